"""The routes of /v1/files: files that callers upload for vector stores and batches."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile

from schemas.errors import BodyTooLarge, InvalidRequest, NotFound
from schemas.records import StoredFile
from streams.calls.errors import shorten
from streams.calls.ids import new_object_id
from streams.gateway.http.entry import Callers
from streams.gateway.http.uploads import parts_of
from streams.log.clock import wall_ms
from streams.openai.objects.bodies import FilePaging
from streams.openai.objects.log import PART_BYTES, Objects
from streams.openai.objects.shapes import file_json, page
from streams.openai.objects.table import STORED, UPLOADING

PURPOSES = ("assistants", "batch", "user_data")
FILENAME_CHARS_MAX = 255
_EXPIRY = ("expires_after[anchor]", "expires_after[seconds]")
_EXPIRY_S = (3_600, 2_592_000)
_FIELDS = {"file", "purpose", *_EXPIRY}
_CONTROLS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def file_routes(callers: Callers, objects: Objects, router: APIRouter) -> None:
    """Add the routes of /v1/files."""

    @router.post("/v1/files", tags=["OpenAI"])
    async def upload(request: Request) -> dict[str, Any]:
        """Upload a file, for vector stores or batches."""
        return await _upload(callers, objects, request)

    @router.get("/v1/files", tags=["OpenAI"])
    async def list_files(
        request: Request, paging: Annotated[FilePaging, Query()]
    ) -> dict[str, Any]:
        """List the caller's files, page by page."""
        table, tenant = objects.table, callers.tenant_of(request)

        return page(
            table.file_order(tenant),
            paging,
            kind=paging.purpose or "",
            find=lambda file_id: table.file(tenant, file_id),
            shape=file_json,
        )

    @router.get("/v1/files/{file_id}", tags=["OpenAI"])
    async def get_file(file_id: str, request: Request) -> dict[str, Any]:
        """Return a file's description, without its content."""
        return file_json(require_file(callers, objects, request, file_id))

    @router.get("/v1/files/{file_id}/content", tags=["OpenAI"])
    async def content(file_id: str, request: Request) -> StreamingResponse:
        """Download the content of a file."""
        file = require_file(callers, objects, request, file_id)
        headers = {"content-length": str(file.bytes)}
        parts = objects.read_parts(file)
        return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)

    @router.delete("/v1/files/{file_id}", tags=["OpenAI"])
    async def delete(file_id: str, request: Request) -> dict[str, Any]:
        """Delete a file, and remove it from all vector stores."""
        file = require_file(callers, objects, request, file_id)
        await objects.put(*objects.table.deletion_of(file))
        return {"id": file_id, "object": "file", "deleted": True}


def require_file(callers: Callers, objects: Objects, request: Request, file_id: str) -> StoredFile:
    """Return the caller's file with this id; raises NotFound."""
    file = objects.table.file(callers.tenant_of(request), file_id)
    if file is None:
        raise NotFound(f"no such file: {file_id[:64]!r}")
    return file


async def _upload(callers: Callers, objects: Objects, request: Request) -> dict[str, Any]:
    tenant, now_ms = callers.tenant_of(request), wall_ms()
    async with callers.uploads.form(request, tenant) as form:
        data = form.get("file")
        for name in form:
            if name not in _FIELDS:
                raise InvalidRequest(f"{name[:64]}: unknown field; leave it out", name[:64])
        if not isinstance(data, UploadFile):
            raise InvalidRequest("file: expected a file with a name, found none", "file")
        size, bytes_max = data.size or 0, callers.uploads.bytes_max
        if not size:
            raise InvalidRequest("file: expected a file with content, found 0 bytes", "file")
        if size > bytes_max:
            raise BodyTooLarge(f"file: expected at most {bytes_max} bytes, found {size}")
        file_id = new_object_id("file-", now_ms)
        file = StoredFile(
            file_id=file_id,
            tenant=tenant,
            filename=_filename(data.filename or ""),
            purpose=_purpose(form.get("purpose")),
            bytes=size,
            created_ms=now_ms,
            expires_ms=_expires_ms(form, now_ms),
            state=UPLOADING,
            partition=objects.partition(file_id),
            parts=(0,) * -(-size // PART_BYTES),
        )
        await objects.put(file)
        offsets = await objects.write_parts(file, parts_of(data, PART_BYTES))
    stored = replace(file, state=STORED, parts=tuple(offsets))
    await objects.put(stored)
    return file_json(stored)


def _filename(name: str) -> str:
    """Return the last part of a path, with slashes or backslashes."""
    filename = _CONTROLS.sub("", re.split(r"[/\\]", name)[-1]).strip()
    if filename in ("", ".", "..") or len(filename) > FILENAME_CHARS_MAX:
        raise InvalidRequest(
            f"file: expected a name of 1 to {FILENAME_CHARS_MAX} characters, found {shorten(name)}",
            "file",
        )
    return filename


def _purpose(value: Any) -> str:
    if value not in PURPOSES:
        raise InvalidRequest(
            f"purpose: expected {' or '.join(PURPOSES)}, found {shorten(value)}", "purpose"
        )
    return str(value)


def _expires_ms(form: Mapping[str, Any], now_ms: int) -> int:
    anchor, seconds = (form.get(name) for name in _EXPIRY)
    if anchor is None and seconds is None:
        return 0
    min_s, max_s = _EXPIRY_S
    text = seconds if isinstance(seconds, str) and len(seconds) < 9 else ""
    is_number = text.isascii() and text.isdigit() and min_s <= int(text) <= max_s
    if anchor != "created_at" or not is_number:
        raise InvalidRequest(
            f"expires_after: expected anchor created_at and seconds from {min_s} to {max_s}, found "
            f"{shorten(anchor)} and {shorten(seconds)}",
            "expires_after",
        )
    return now_ms + int(text) * 1000

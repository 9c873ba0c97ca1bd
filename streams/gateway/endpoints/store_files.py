"""The routes of /v1/vector_stores/{id}/files and file_batches: a store's files and their states."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from schemas.errors import InvalidRequest, NotFound
from schemas.records import FileBatch, VectorStore
from streams.calls.ids import new_object_id
from streams.gateway.endpoints.files import require_file
from streams.gateway.endpoints.vector_stores import note_use, require_store
from streams.gateway.http.entry import Callers, run_while_connected
from streams.log.clock import wall_ms
from streams.log.slices import in_slices
from streams.openai.indexing.reading import FILE_PROCESS, Unusable, texts_of
from streams.openai.objects.attaching import attribute_kinds, check_kinds, new_specs
from streams.openai.objects.bodies import (
    AttributesBody,
    BatchBody,
    StoreFileBody,
    StoreFilePaging,
    attributes_text,
)
from streams.openai.objects.log import Objects
from streams.openai.objects.shapes import batch_json, content_page, page, store_file_json
from streams.openai.objects.stores import CANCELLED, DELETED, IN_PROGRESS, StoreEntry, kind_of

_STORE = "/v1/vector_stores/{vector_store_id}"
_FILE, _BATCH = _STORE + "/files/{file_id}", _STORE + "/file_batches/{batch_id}"
Paging = Annotated[StoreFilePaging, Query()]


def store_file_routes(callers: Callers, objects: Objects, parse_ms: int, router: APIRouter) -> None:
    """Add the routes of a vector store's files."""

    @router.post(_STORE + "/files", tags=["OpenAI"])
    async def attach(vector_store_id: str, request: Request) -> dict[str, Any]:
        """Add a file to a vector store."""
        store = require_store(callers, objects, request, vector_store_id, in_use=True)
        body = await callers.read_body(request, StoreFileBody)
        await _attach(objects, store, [body], "")
        return store_file_json(store, _entry(objects, store, body.file_id))

    @router.get(_STORE + "/files", tags=["OpenAI"])
    async def list_files(vector_store_id: str, request: Request, paging: Paging) -> dict[str, Any]:
        """List the files of a vector store."""
        store = require_store(callers, objects, request, vector_store_id)
        return _page(objects, store, paging, "")

    @router.get(_FILE, tags=["OpenAI"])
    async def get_file(vector_store_id: str, file_id: str, request: Request) -> dict[str, Any]:
        """Return a vector store file with its status."""
        store = require_store(callers, objects, request, vector_store_id)
        return store_file_json(store, _entry(objects, store, file_id))

    @router.post(_FILE, tags=["OpenAI"])
    async def change(vector_store_id: str, file_id: str, request: Request) -> dict[str, Any]:
        """Change the attributes of a file; its status is in_progress until filters use them."""
        store = require_store(callers, objects, request, vector_store_id, in_use=True)
        body = await callers.read_body(request, AttributesBody)
        spec = _entry(objects, store, file_id).spec
        attributes = attributes_text(body.attributes)
        kinds = attribute_kinds(objects.table, store)
        check_kinds(kinds, attributes)
        changed = replace(spec, attributes=attributes, revision=spec.revision + 1)
        await objects.put(changed)
        return store_file_json(store, _entry(objects, store, file_id))

    @router.delete(_FILE, tags=["OpenAI"])
    async def delete(vector_store_id: str, file_id: str, request: Request) -> dict[str, Any]:
        """Remove a file from a vector store; the file itself stays."""
        store = require_store(callers, objects, request, vector_store_id)
        spec = _entry(objects, store, file_id).spec
        deleted_spec = replace(spec, target_state=DELETED, revision=spec.revision + 1)
        await objects.put(deleted_spec)
        return {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}

    @router.get(_FILE + "/content", tags=["OpenAI"])
    async def content(vector_store_id: str, file_id: str, request: Request) -> StreamingResponse:
        """Return the text of a vector store's file."""
        store = require_store(callers, objects, request, vector_store_id)
        _entry(objects, store, file_id)
        file, limit_ms = require_file(callers, objects, request, file_id), parse_ms
        parts = objects.read_parts(file)
        try:
            reading = texts_of(file, parts, limit_ms, FILE_PROCESS)
            texts = await run_while_connected(request.receive, reading)
        except Unusable as error:
            raise InvalidRequest(f"{file_id}: {error}") from error
        pieces = in_slices(content_page([text.text for text in texts]))
        return StreamingResponse(pieces, media_type="application/json")


def batch_routes(callers: Callers, objects: Objects, router: APIRouter) -> None:
    """Add the routes of file batches."""

    @router.post(_STORE + "/file_batches", tags=["OpenAI"])
    async def create_batch(vector_store_id: str, request: Request) -> dict[str, Any]:
        """Add several files to a vector store."""
        store = require_store(callers, objects, request, vector_store_id, in_use=True)
        body = await callers.read_body(request, BatchBody)
        now_ms = wall_ms()
        batch = FileBatch(
            batch_id=new_object_id("vsfb_", now_ms),
            store_id=store.store_id,
            tenant=store.tenant,
            created_ms=now_ms,
        )
        await _attach(objects, store, body.file_bodies(), batch.batch_id, batch)
        return batch_json(objects.table, store, batch)

    @router.get(_BATCH, tags=["OpenAI"])
    async def get_batch(vector_store_id: str, batch_id: str, request: Request) -> dict[str, Any]:
        """Return a file batch with its status and counts."""
        store = require_store(callers, objects, request, vector_store_id)
        return batch_json(objects.table, store, _batch(objects, store, batch_id))

    @router.post(_BATCH + "/cancel", tags=["OpenAI"])
    async def cancel(vector_store_id: str, batch_id: str, request: Request) -> dict[str, Any]:
        """Cancel the files of a batch that are still in progress."""
        store = require_store(callers, objects, request, vector_store_id)
        batch, table = _batch(objects, store, batch_id), objects.table
        files = table.contents(store)
        entries = [files.entry(file_id) async for file_id in in_slices(list(files.files))]
        given_up = [
            replace(entry.spec, target_state=CANCELLED, revision=entry.spec.revision + 1)
            for entry in entries
            if entry is not None and entry.status == IN_PROGRESS and entry.spec.batch_id == batch_id
        ]
        if given_up:
            batch = replace(batch, cancelled=True)
            await objects.put(batch, *given_up)
        return batch_json(objects.table, store, batch)

    @router.get(_BATCH + "/files", tags=["OpenAI"])
    async def list_files(
        vector_store_id: str, batch_id: str, request: Request, paging: Paging
    ) -> dict[str, Any]:
        """List the files of a file batch."""
        store = require_store(callers, objects, request, vector_store_id)
        batch = _batch(objects, store, batch_id)
        return _page(objects, store, paging, batch.batch_id)


async def _attach(
    objects: Objects,
    store: VectorStore,
    bodies: list[StoreFileBody],
    batch_id: str,
    *batches: FileBatch,
) -> None:
    specs = new_specs(objects.table, store, bodies, batch_id, wall_ms())
    await objects.put(*batches, *specs)
    await note_use(objects, store)


def _entry(objects: Objects, store: VectorStore, file_id: str) -> StoreEntry:
    entry = objects.table.contents(store).entry(file_id)
    if entry is None:
        raise NotFound(f"no such file in vector store {store.store_id}: {file_id[:64]!r}")
    return entry


def _batch(objects: Objects, store: VectorStore, batch_id: str) -> FileBatch:
    batch = objects.table.contents(store).batches.get(batch_id)
    if batch is None:
        raise NotFound(f"no such file batch in {store.store_id}: {batch_id[:64]!r}")
    return batch


def _page(
    objects: Objects, store: VectorStore, paging: StoreFilePaging, batch_id: str
) -> dict[str, Any]:
    files = objects.table.contents(store)
    return page(
        files.order,
        paging,
        kind=kind_of(paging.filter or "", batch_id),
        find=files.entry,
        shape=lambda entry: store_file_json(store, entry),
    )

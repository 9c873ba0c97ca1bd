"""The routes of /v1/batches: files of calls that `streams/openai/batches` answers.

Calls of a batch run when there is capacity.
"""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from schemas.errors import InvalidRequest, NotFound
from schemas.records import Batch
from streams.calls.errors import shorten
from streams.calls.ids import new_object_id
from streams.gateway.endpoints.files import require_file
from streams.gateway.http.entry import Callers
from streams.log.clock import wall_ms
from streams.openai.batches.lines import ENDPOINTS
from streams.openai.batches.shapes import WINDOWS_MS, BatchCreateBody, batch_json
from streams.openai.objects.batches import ENDED, PREFIX
from streams.openai.objects.bodies import StorePaging
from streams.openai.objects.log import Objects
from streams.openai.objects.shapes import metadata_text, page

_BATCH = "/v1/batches/{batch_id}"


def call_batch_routes(callers: Callers, objects: Objects, router: APIRouter) -> None:
    """Add the routes of /v1/batches."""

    @router.post("/v1/batches", tags=["OpenAI"])
    async def create(request: Request) -> dict[str, Any]:
        """Create a batch: the calls in a file are answered within the completion window."""
        return await _create(callers, objects, request)

    @router.get("/v1/batches", tags=["OpenAI"])
    async def list_batches(
        request: Request, paging: Annotated[StorePaging, Query()]
    ) -> dict[str, Any]:
        """List the caller's batches, the newest first."""
        table, tenant = objects.table.batches, callers.tenant_of(request)
        return page(
            table.order(tenant),
            paging,
            find=lambda batch_id: table.get(tenant, batch_id),
            shape=lambda batch: batch_json(table, batch),
        )

    @router.get(_BATCH, tags=["OpenAI"])
    async def get_batch(batch_id: str, request: Request) -> dict[str, Any]:
        """Return a batch with its status and counts."""
        table = objects.table.batches
        return batch_json(table, _require_batch(callers, objects, request, batch_id))

    @router.post(_BATCH + "/cancel", tags=["OpenAI"])
    async def cancel(batch_id: str, request: Request) -> dict[str, Any]:
        """Cancel a batch; answers that it already has are kept."""
        batch, table = _require_batch(callers, objects, request, batch_id), objects.table.batches
        if (status := table.status(batch)) in ENDED:
            raise InvalidRequest(f"{batch_id}: expected a batch that has not ended, it is {status}")
        if not batch.cancelled_ms:
            await objects.put(replace(batch, cancelled_ms=wall_ms()))
        return batch_json(table, _require_batch(callers, objects, request, batch_id))


def _require_batch(callers: Callers, objects: Objects, request: Request, batch_id: str) -> Batch:
    batch = objects.table.batches.get(callers.tenant_of(request), batch_id)
    if batch is None:
        raise NotFound(f"no such batch: {batch_id[:64]!r}")
    return batch


async def _create(callers: Callers, objects: Objects, request: Request) -> dict[str, Any]:
    tenant, now_ms = callers.tenant_of(request), wall_ms()
    body = await callers.read_body(request, BatchCreateBody)
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequest(
            f"endpoint: expected one of {', '.join(ENDPOINTS)}, found {shorten(body.endpoint)}",
            "endpoint",
        )
    file = require_file(callers, objects, request, body.input_file_id)
    if file.purpose != "batch":
        raise InvalidRequest(
            f"input_file_id: expected a file of purpose batch, found {file.purpose}",
            "input_file_id",
        )
    expiry = body.output_expires_after
    batch = Batch(
        batch_id=new_object_id(PREFIX, now_ms),
        tenant=tenant,
        input_file_id=file.file_id,
        endpoint=body.endpoint,
        window=body.completion_window,
        metadata=metadata_text(body.metadata),
        created_ms=now_ms,
        expires_ms=now_ms + WINDOWS_MS[body.completion_window],
        output_expires_s=expiry.seconds if expiry is not None else 0,
    )
    await objects.put(batch)
    return batch_json(objects.table.batches, batch)

"""Batches in the form of the `openai` package, and their schemas on the OpenAPI page."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.records import Batch, BatchProgress
from streams.openai.objects.batches import (
    CANCELLED,
    COMPLETED,
    ENDED,
    EXPIRED,
    FAILED,
    BatchTable,
)
from streams.openai.objects.bodies import Texts
from streams.openai.objects.openapi_shapes import COUNT, TEXT, list_shape, shape_of

WINDOWS_MS = {"24h": 86_400_000}
_BATCHES, _BATCH = "/v1/batches", "/v1/batches/{batch_id}"


class _BatchModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class OutputExpiry(_BatchModel):
    """When the files with results are deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3_600, le=2_592_000)


class BatchCreateBody(_BatchModel):
    """The body of POST /v1/batches."""

    input_file_id: str = Field(min_length=1, max_length=64)
    endpoint: str = Field(max_length=64)
    completion_window: Literal["24h"]
    metadata: Texts | None = None
    output_expires_after: OutputExpiry | None = None


def batch_json(table: BatchTable, batch: Batch) -> dict[str, Any]:
    """Build the `batch` object of the API."""
    progress = table.progress(batch) or BatchProgress(
        batch_id=batch.batch_id, tenant=batch.tenant, status=table.status(batch), at_ms=0
    )
    end_times_ms = {status: progress.ended_ms * (progress.status == status) for status in ENDED}
    errors = json.loads(progress.errors) if progress.errors else None
    has_ended = progress.status in ENDED
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.window,
        "status": table.status(batch),
        "output_file_id": progress.output_file_id if has_ended and progress.output_bytes else None,
        "error_file_id": progress.error_file_id if has_ended and progress.error_bytes else None,
        "created_at": batch.created_ms // 1000,
        "in_progress_at": _seconds(progress.started_ms),
        "expires_at": batch.expires_ms // 1000,
        "finalizing_at": _seconds(progress.finalizing_ms),
        "completed_at": _seconds(end_times_ms[COMPLETED]),
        "failed_at": _seconds(end_times_ms[FAILED]),
        "expired_at": _seconds(end_times_ms[EXPIRED]),
        "cancelling_at": _seconds(batch.cancelled_ms),
        "cancelled_at": _seconds(end_times_ms[CANCELLED]),
        "request_counts": {
            "total": progress.total,
            "completed": progress.completed,
            "failed": progress.failed,
        },
        "usage": _usage(progress),
        "metadata": json.loads(batch.metadata) if batch.metadata else None,
    }


def _seconds(ms: int) -> int | None:
    return ms // 1000 if ms else None


def _usage(progress: BatchProgress) -> dict[str, Any]:
    return {
        "input_tokens": progress.prompt_tokens,
        "input_tokens_details": {"cached_tokens": progress.cached_tokens},
        "output_tokens": progress.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": progress.reasoning_tokens},
        "total_tokens": progress.prompt_tokens + progress.completion_tokens,
    }


# On the OpenAPI page

_COUNTS = dict.fromkeys(("total", "completed", "failed"), COUNT)
_SHAPE = shape_of(
    *("batch",), id=TEXT, endpoint=TEXT, input_file_id=TEXT, completion_window=TEXT, status=TEXT,
    created_at=COUNT, expires_at=COUNT,
    request_counts={"type": "object", "properties": _COUNTS, "required": [*_COUNTS]},
)  # fmt: skip
BODIES: dict[str, type[BaseModel]] = {_BATCHES: BatchCreateBody}
SHAPES: dict[tuple[str, str], dict[str, Any]] = {
    (_BATCHES, "post"): _SHAPE,
    (_BATCHES, "get"): list_shape(_SHAPE),
    (_BATCH, "get"): _SHAPE,
    (_BATCH + "/cancel", "post"): _SHAPE,
}

"""Sums what requests have used, and checks that each has exactly one usage record.

Free of I/O, except for `read_usage`, which reads the topic's committed records.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from schemas.errors import RecordError
from schemas.records import OutcomeKind, Usage
from schemas.settings import LogSettings
from streams.log.clients import AssignedReader
from streams.log.registry import make_codec

NAMED_MAX = 5  # gaps and repeats that are named


def _hour(usage: Usage) -> str:
    return datetime.fromtimestamp(usage.ended_ms / 1000, UTC).strftime("%Y-%m-%dT%H:00Z")


BY: dict[str, Callable[[Usage], str]] = {
    "tenant": lambda usage: usage.tenant,
    "model": lambda usage: usage.model,
    "class": lambda usage: usage.priority.value,
    "hour": _hour,
    "endpoint": lambda usage: usage.endpoint.value,
    "kind": lambda usage: usage.kind.value,
}


@dataclass(slots=True)
class Sum:
    """The summed usage of some requests."""

    requests: int = 0
    completed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retrieved_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    worker_s: float = 0.0

    def add(self, usage: Usage) -> None:
        """Add the usage of one request to the sum."""
        self.requests += 1
        self.completed += usage.kind is OutcomeKind.COMPLETED
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.retrieved_tokens += usage.retrieved_tokens
        self.completion_tokens += usage.completion_tokens
        self.reasoning_tokens += usage.reasoning_tokens
        self.worker_s += usage.worker_ms / 1000


class Sums:
    """The usage of groups of requests, and of all of them."""

    def __init__(self, by: Sequence[str]) -> None:
        self.by = tuple(by)
        self.total = Sum()
        self._groups: defaultdict[tuple[str, ...], Sum] = defaultdict(Sum)

    def add(self, usage: Usage) -> None:
        """Add one usage record to its group and to the total."""
        self.total.add(usage)
        self._groups[tuple(BY[name](usage) for name in self.by)].add(usage)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each group, in order of its names."""
        groups = sorted(self._groups.items())
        return [dict(zip(self.by, names, strict=True)) | asdict(total) for names, total in groups]


@dataclass(slots=True)
class Check:
    """Checks that the numbers have no gap, and that no number or request is repeated."""

    gaps: list[str] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)
    _next: dict[int, int] = field(default_factory=dict)  # expected number, by partition
    _request_ids: set[str] = field(default_factory=set)

    def add(self, partition: int, usage: Usage) -> None:
        """Check the next record of a partition; the first one read may have any number."""
        expected = self._next.get(partition, usage.number)
        where = f"partition {partition}: number {usage.number}"
        if usage.number > expected:
            self.gaps.append(f"{where} where {expected} was expected")
        elif usage.number < expected:
            self.repeats.append(f"{where} again, of {usage.request_id}")
        self._next[partition] = max(expected, usage.number + 1)
        if usage.request_id in self._request_ids:
            self.repeats.append(f"{where} is of {usage.request_id}, which has one")
        self._request_ids.add(usage.request_id)

    @property
    def holds(self) -> bool:
        return not self.gaps and not self.repeats


async def read_usage(log: LogSettings, since_ms: int = 0) -> AsyncIterator[tuple[int, Usage]]:
    """Yield the partition and record of all usage that was committed since `since_ms`."""
    codec = make_codec(log)
    partitions = range(log.partitions("session"))
    reader = AssignedReader(
        log, "usage", partitions, client_id="trivium-usage", committed_only=True
    )
    async with reader.reading("nowhere"):
        ends = await reader.end_offsets()
        firsts = await reader.first_offsets()
        await reader.seek(await reader.offsets_at(since_ms) if since_ms else firsts)
        async for records in reader.until(ends):
            for record in records:
                with suppress(RecordError):  # not one of ours
                    if isinstance(usage := codec.decode(record.value), Usage):
                        yield record.partition, usage

"""Stores data of requests that are not live: ended ids, and early cancellations.

An early cancellation arrives before its request. Both tables are bounded in number and age, and
evict the oldest first. The router and its handlers use them.
"""

from collections import OrderedDict
from typing import Final

from schemas.records import Cancellation, CancelReason, Request

EARLY_CANCEL_MS = 60_000
EARLY_CANCELS_MAX: Final = 10_000  # far more than calls that end while their request is written


class EndedIds:
    """Ids of ended requests, so that no late record starts one again."""

    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._ids: OrderedDict[str, tuple[int, int]] = OrderedDict()  # until_ms, partition

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str, until_ms: int, partition: int) -> None:
        """Store an id until `until_ms`."""
        self._ids[request_id] = (until_ms, partition)
        if len(self._ids) > self._ids_max:
            self._ids.popitem(last=False)

    def sweep(self, now_ms: int) -> None:
        """Drop the ids whose time is over."""
        while self._ids and next(iter(self._ids.values()))[0] <= now_ms:
            self._ids.popitem(last=False)

    def forget_partition(self, partition: int) -> None:
        """Drop a partition's entries, because another router stores them now."""
        for request_id in [r for r, (_, p) in self._ids.items() if p == partition]:
            del self._ids[request_id]


class EarlyCancellations:
    """Cancellations that arrived before their requests, the first of each tenant."""

    def __init__(self, cancellations_max: int = EARLY_CANCELS_MAX) -> None:
        self._max = cancellations_max
        self._cancellations: OrderedDict[tuple[str, str], tuple[CancelReason, int, int]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._cancellations)

    def add(self, cancellation: Cancellation, partition: int, now_ms: int) -> None:
        """Store a cancellation; the first one of each tenant counts."""
        key = cancellation.request_id, cancellation.tenant
        self._cancellations.setdefault(key, (cancellation.reason, partition, now_ms))
        while len(self._cancellations) > self._max:
            self._cancellations.popitem(last=False)

    def take(self, request: Request) -> CancelReason | None:
        """Remove a request's cancellations; return the reason of one that may cancel it, if any."""
        reason = None
        for tenant in (request.tenant, ""):
            reason = self._cancellations.pop((request.request_id, tenant), (reason, 0, 0))[0]
        return reason

    def sweep(self, now_ms: int) -> None:
        """Drop cancellations older than `EARLY_CANCEL_MS`."""
        while (
            self._cancellations
            and now_ms - next(iter(self._cancellations.values()))[2] > EARLY_CANCEL_MS
        ):
            self._cancellations.popitem(last=False)

    def forget_partition(self, partition: int) -> None:
        """Drop a partition's entries, because another router stores them now."""
        for key in [key for key, (_, p, _) in self._cancellations.items() if p == partition]:
            del self._cancellations[key]

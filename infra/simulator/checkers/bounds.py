"""Invariant 6: everything is bounded."""

from collections import Counter
from collections.abc import Sequence
from math import inf

from infra.simulator.cluster import Checker, Cluster
from infra.simulator.log.bus import shared_codec
from schemas.records import DecisionKind, Heartbeat, TokenFrame
from schemas.rules.sizes import FRAME_BYTES_MAX
from streams.core.effects import Decide, Effect, End
from streams.core.events import Event, OutcomeArrived, PartitionReady, RequestArrived

_NUMBER, _LETTER = 10, 4  # bytes at most, per number and per letter
_NUMBERS_OF_ROW = 6  # numbers of a row, with the lengths of its two texts
_FRAME_BYTES = 1_000  # the worker's id, the time, and the framing of each column


def bytes_at_most(frame: TokenFrame) -> float:
    """Return an upper bound of a frame's size; the exact size takes a third of a frame's time.

    The bound is infinite for a frame with more than tokens.
    """
    beside_tokens = (frame.logprobs, frame.ends, frame.starts, frame.retrieved, frame.voids)
    if any(beside_tokens) or frame.deltas:
        return inf
    letters = sum(map(len, frame.request_ids)) + sum(map(len, frame.texts)) + len(frame.worker_id)
    numbers = len(frame.token_ids) + _NUMBERS_OF_ROW * len(frame.request_ids)
    return _FRAME_BYTES + _NUMBER * numbers + _LETTER * letters


class Bounds(Checker):
    """Bounds of frames, of the admission queue, of workers' requests and of engines' KV."""

    def __init__(self, queue_requests_max: int) -> None:
        self._queue_max = queue_requests_max
        self._models: dict[str, str] = {}  # by request id; records may be repeated
        self._queued: set[str] = set()
        self._granted: dict[str, int] = {}
        self._codec = shared_codec()
        self._is_down = False

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Check the number of requests that wait for admission."""
        if isinstance(event, RequestArrived):
            request = event.request
            if request.request_id not in self._models:
                self._queued.add(request.request_id)
                self._models[request.request_id] = request.model
        elif isinstance(event, OutcomeArrived):
            self._queued.discard(event.outcome.request_id)
        for effect in effects:
            if isinstance(effect, End):
                self._queued.discard(effect.outcome.request_id)
            elif isinstance(effect, Decide) and effect.decision.kind in (
                DecisionKind.PLACE,
                DecisionKind.REPLACE,
            ):
                self._queued.discard(effect.decision.request_id)
        if isinstance(event, PartitionReady):
            self._is_down = False
        if not self._is_down and len(self._queued) > self._queue_max:
            waiting = Counter(self._models[request_id] for request_id in self._queued)
            longest = max(waiting.values())  # each model has its own queue
            assert longest <= self._queue_max, f"{longest} wait for admission"

    def on_router_death(self) -> None:
        """Note that the router is down: requests wait in the log meanwhile."""
        self._is_down = True

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Check the size of frames that may be large, and note the workers' grants."""
        if isinstance(record, TokenFrame):
            if bytes_at_most(record) > FRAME_BYTES_MAX:
                size = len(self._codec.encode(record))
                assert size <= FRAME_BYTES_MAX, f"a frame of {size} bytes"
        elif isinstance(record, Heartbeat) and record.grants:
            self._granted[record.member_id] = sum(grant.credits for grant in record.grants)

    def on_tick(self, cluster: Cluster) -> None:
        """Check the number of requests and of KV blocks of each worker."""
        for name, worker in cluster.workers.items():
            state, limit = worker.process.engine.state, 2 * self._granted.get(name, 0)
            assert len(worker.process.requests) <= limit, (
                f"{name} holds {len(worker.process.requests)}"
            )
            assert state.cache.used <= state.cache.blocks_max, f"{name}: {state.cache.used} blocks"

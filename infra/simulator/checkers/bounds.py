"""Invariant 6: everything is bounded."""

from collections.abc import Sequence
from math import inf

from infra.simulator.cluster import Checker, Cluster
from infra.simulator.log.bus import shared_codec
from schemas.records import DecisionKind, Heartbeat, TokenFrame
from schemas.rules.sizes import FRAME_BYTES_MAX
from streams.core.effects import Decide, Effect, End
from streams.core.events import Event, OutcomeArrived, PartitionReady, RequestArrived

_NUMBER, _LETTER = 10, 4  # bytes at most
_NUMBERS_OF_ROW = 6  # with the lengths of its two texts
_FRAME_BYTES = 1_000  # a worker's name, the time, and the beginning and end of each column


def bytes_at_most(frame: TokenFrame) -> float:
    """A size that the frame does not exceed: to know its own takes a third of a frame's time. None
    is known where it has more in it than tokens."""
    if frame.logprobs or frame.ends or frame.starts or frame.retrieved or frame.voids:
        return inf
    letters = sum(map(len, frame.request_ids)) + sum(map(len, frame.texts)) + len(frame.worker_id)
    numbers = len(frame.token_ids) + _NUMBERS_OF_ROW * len(frame.request_ids)
    return _FRAME_BYTES + _NUMBER * numbers + _LETTER * letters


class Bounds(Checker):
    """Frames, what waits for admission, what workers hold, what engines keep."""

    def __init__(self, queue_requests_max: int) -> None:
        self._queue_max = queue_requests_max
        self._arrived: set[str] = set()  # a record of theirs may come again
        self._queued: set[str] = set()
        self._granted: dict[str, int] = {}
        self._codec = shared_codec()
        self._is_down = False

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Check the number of requests that wait for admission."""
        if isinstance(event, RequestArrived):
            if event.request.request_id not in self._arrived:
                self._queued.add(event.request.request_id)
            self._arrived.add(event.request.request_id)
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
        waiting = 0 if self._is_down else len(self._queued)
        assert waiting <= self._queue_max, f"{waiting} wait for admission"

    def on_router_death(self) -> None:
        """Note that the router is down: what arrives now waits in the log."""
        self._is_down = True

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Measure frames that may be large, and note what workers grant."""
        if isinstance(record, TokenFrame):
            if bytes_at_most(record) > FRAME_BYTES_MAX:
                size = len(self._codec.encode(record))
                assert size <= FRAME_BYTES_MAX, f"a frame of {size} bytes"
        elif isinstance(record, Heartbeat) and record.grants:
            self._granted[record.member_id] = sum(grant.credits for grant in record.grants)

    def on_tick(self, cluster: Cluster) -> None:
        """Look at workers and their engines."""
        for name, worker in cluster.workers.items():
            state, limit = worker.process.engine.state, 2 * self._granted.get(name, 0)
            assert len(worker.process.requests) <= limit, (
                f"{name} holds {len(worker.process.requests)}"
            )
            assert state.cache.used <= state.cache.blocks_max, f"{name}: {state.cache.used} blocks"

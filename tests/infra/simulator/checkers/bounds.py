"""Invariant 6: everything is bounded."""

from collections.abc import Sequence

from infra.simulator.cluster import Checker, Cluster
from schemas.codec import Codec
from schemas.records import DecisionKind, Heartbeat, TokenFrame
from schemas.rules.sizes import FRAME_BYTES_MAX
from streams.core.effects import Decide, Effect, End
from streams.core.events import Event, OutcomeArrived, RequestArrived


class Bounds(Checker):
    """Frames, what waits for admission, what workers hold, what engines keep."""

    def __init__(self, queue_requests_max: int) -> None:
        self._queue_max = queue_requests_max
        self._queued: set[str] = set()
        self._granted: dict[str, int] = {}
        self._codec = Codec()

    def applied(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Count what waits."""
        if isinstance(event, RequestArrived):
            self._queued.add(event.request.request_id)
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
        assert len(self._queued) <= self._queue_max, f"{len(self._queued)} wait for admission"

    def wrote(self, topic: str, record: object, now_ms: float) -> None:
        """Measure frames, and note what workers grant."""
        if isinstance(record, TokenFrame):
            size = len(self._codec.encode(record))
            assert size <= FRAME_BYTES_MAX, f"a frame of {size} bytes"
        elif isinstance(record, Heartbeat) and record.grants:
            self._granted[record.member_id] = sum(grant.credits for grant in record.grants)

    def looked(self, cluster: Cluster) -> None:
        """Look at workers and their engines."""
        for name, worker in cluster.workers.items():
            state, most = worker.life.engine.state, 2 * self._granted.get(name, 0)
            assert len(worker.life.held) <= most, f"{name} holds {len(worker.life.held)}"
            assert state.cache.used <= state.cache.blocks_max, f"{name}: {state.cache.used} blocks"

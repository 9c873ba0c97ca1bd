"""Invariant 3: no worker gets or runs work beyond its grants."""

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from infra.simulator.cluster import Checker, Cluster
from schemas.fleet import DEAF_MS, LEASE_MS
from schemas.records import (
    CancelWork,
    Decision,
    Heartbeat,
    Orchestration,
    Outcome,
    Phase,
    PhaseKind,
    Role,
    Work,
    WorkPhase,
)
from streams.core.effects import Decide, Dispatch, Effect, End
from streams.core.events import (
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PartitionReady,
    PhaseArrived,
)

_Attempt = tuple[str, int]  # request and attempt
IDLE_MS = 500.0  # longest time until an engine stops a job that is over


class Credits(Checker):
    """No worker gets more work than it granted, and a silent worker gets none.

    Exempt is work whose decision was lost with its router, which the next router does not know.
    """

    def __init__(self) -> None:
        self._is_down = False  # later effects are the last ones of a dead router
        self._granted: dict[tuple[str, bool], int] = {}  # by worker, and whether for prefill
        self._attempts: dict[tuple[str, bool], set[_Attempt]] = defaultdict(set)
        self._heard_ms: dict[str, float] = {}
        self._beats: dict[str, tuple[int, int]] = {}  # epoch and seq of the latest
        self._fleet_ms = 0.0  # time of the last fleet record
        self._hearing_since_ms = 0.0  # when fleet records came again after a silence

    def on_router_death(self) -> None:
        """Note that no router is there until the next one."""
        self._is_down = True

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Update the attempts of each worker from one event."""
        if isinstance(event, FleetRecordArrived):
            if now_ms - self._fleet_ms > DEAF_MS:
                self._hearing_since_ms = now_ms
            self._fleet_ms = now_ms
            if isinstance(event.record, Heartbeat):
                self._on_beat(event.record, now_ms)
        elif isinstance(event, OutcomeArrived):
            self._end_request(event.outcome)
        elif isinstance(event, PhaseArrived) and event.phase.kind in (
            PhaseKind.PREFILL_DONE,
            PhaseKind.FAILED,
            PhaseKind.REFUSED,
        ):
            self._release(event.phase)
        elif isinstance(event, PartitionReady):
            self._is_down = False
        if effects:
            self._apply_effects(effects, now_ms)

    def _apply_effects(self, effects: Sequence[Effect], now_ms: float) -> None:
        decided = {effect.decision.request_id for effect in effects if isinstance(effect, Decide)}
        for effect in effects:
            if isinstance(effect, Dispatch) and isinstance(effect.record, Work):
                if not self._is_down or effect.record.request_id in decided:
                    self._assign(effect.record, now_ms)
            elif isinstance(effect, Dispatch) and isinstance(effect.record, CancelWork):
                if effect.record.void:  # the worker reads it before any later work
                    self._release(effect.record)
            elif isinstance(effect, End):
                self._end_request(effect.outcome)

    def _on_beat(self, beat: Heartbeat, now_ms: float) -> None:
        """Note grants; a heartbeat of a former epoch or with an old number has no effect."""
        number, last = (beat.epoch, beat.seq), self._beats.get(beat.member_id, (0, -1))
        if number > last:
            if number[0] > last[0]:  # a new epoch has no attempts
                for prefill in (True, False):
                    self._attempts[beat.member_id, prefill] = set()
            self._beats[beat.member_id] = number
            self._heard_ms[beat.member_id] = now_ms
            for prefill in (True, False):
                granted = [g.credits for g in beat.grants if (g.role is Role.PREFILL) == prefill]
                self._granted[beat.member_id, prefill] = sum(granted)

    def _assign(self, work: Work, now_ms: float) -> None:
        self._drop_attempts(
            work.request_id, work.attempt
        )  # a new attempt voids earlier ones on all workers
        window = work.worker_id, work.phase is WorkPhase.PREFILL
        attempts = self._attempts[window]
        attempts.add((work.request_id, work.attempt))
        limit = self._granted[window]
        assert len(attempts) <= limit, (
            f"{work.worker_id}: {len(attempts)} requests, {limit} granted"
        )
        silent_ms = int(now_ms) - int(self._heard_ms[work.worker_id])  # whole ms, as in the router
        name = f"{work.worker_id}: work after {silent_ms} ms of silence"
        assert silent_ms <= LEASE_MS or self._goes_on_deaf(work, now_ms), name

    def _goes_on_deaf(self, work: Work, now_ms: float) -> bool:
        """Return whether work is the second half of a pair while the router gets no fleet records.

        So it is too for the length of a lease after that: then silence does not mean that the
        worker is lost (`streams/core/fleet/workers.py`).
        """
        half = work.orchestration is Orchestration.DECODE_FIRST and work.phase is WorkPhase.PREFILL
        is_deaf = now_ms - self._fleet_ms > DEAF_MS
        return half and (is_deaf or now_ms - self._hearing_since_ms <= LEASE_MS)

    def _release(self, record: Phase | CancelWork) -> None:
        """Remove an attempt that its worker has finished or lost."""
        for prefill in (True, False):
            self._attempts[record.worker_id, prefill].discard((record.request_id, record.attempt))

    def _end_request(self, outcome: Outcome) -> None:
        self._drop_attempts(outcome.request_id, outcome.attempt + 1)

    def _drop_attempts(self, request_id: str, until: int) -> None:
        """Remove all attempts of a request before `until`, on every worker."""
        for attempts in self._attempts.values():
            over = [
                attempt for attempt in attempts if attempt[0] == request_id and attempt[1] < until
            ]
            attempts.difference_update(over)


class Idle(Checker):
    """Engines compute no job that is over: ended, void or placed again.

    Exempt is work whose decision was lost with its router: it runs to its end. A request that ends
    while no router is alive counts as over from the next router on, as the dead one may not have
    cancelled the work.
    """

    def __init__(self) -> None:
        self._is_down = False
        self._untold: list[Outcome] = []  # outcomes since the router's death
        self._decided: set[tuple[str, str, int]] = set()  # worker, request and attempt
        self._over_ms: defaultdict[str, dict[int, float]] = defaultdict(
            dict
        )  # by request and attempt: time of the outcome
        self._void_ms: dict[tuple[str, str, int], float] = {}  # time of the cancellation
        self._calm_ms: dict[str, float] = {}  # since when a worker is awake and gets its records

    def on_router_death(self) -> None:
        """Note that no router is there until the next one."""
        self._is_down = True

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Note that a new router cancels what the dead one may not have cancelled."""
        if isinstance(event, PartitionReady):
            self._is_down, untold, self._untold = False, self._untold, []
            for outcome in untold:
                self._over(outcome, now_ms)

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Note outcomes, decisions and cancelled work."""
        if isinstance(record, Outcome):
            if self._is_down:
                self._untold.append(record)
            else:
                self._over(record, now_ms)
        elif isinstance(record, Decision):
            for worker_id in (record.prefill_worker, record.decode_worker):
                self._decided.add((worker_id, record.request_id, record.attempt))
        elif isinstance(record, CancelWork):
            name = record.worker_id, record.request_id, record.attempt
            self._void_ms.setdefault(name, now_ms)

    def _over(self, outcome: Outcome, now_ms: float) -> None:
        self._over_ms[outcome.request_id].setdefault(outcome.attempt, now_ms)

    def on_tick(self, cluster: Cluster) -> None:
        """Check that no engine computes a job that is over."""
        now_ms, bus = cluster.clock.now_ms, cluster.bus
        if bus.slow or now_ms < bus.held_until_ms:
            self._calm_ms.clear()
        for worker in cluster.workers.values():
            if worker.clock.is_asleep:
                self._calm_ms.pop(worker.worker_id, None)
                continue
            calm_ms = self._calm_ms.setdefault(worker.worker_id, now_ms)
            for name in worker.process.engine.state.computations:
                if name.startswith("warm."):  # warms a prefix, for no attempt
                    continue
                request_id, _, attempt = name.partition("+")[0].rpartition(".")
                job = worker.worker_id, request_id, int(attempt)
                ends = self._over_ms.get(request_id, {}).items()
                ended_ms = min((ms for last, ms in ends if last >= int(attempt)), default=inf)
                over_ms = min(ended_ms, self._void_ms.get(job, inf))
                if job not in self._decided:
                    continue
                late_ms = now_ms - max(over_ms, calm_ms)
                assert late_ms <= IDLE_MS, f"{worker.worker_id} computes {name}, which is over"

    def on_finish(self, cluster: Cluster) -> None:
        """Check that workers have no jobs, requests or KV a while after the last end."""
        cluster.pass_ms(2 * IDLE_MS)
        for worker in cluster.workers.values():
            requests, state = worker.process.requests, worker.process.engine.state
            unknown = [
                work for work in requests.works if not self._is_decided(worker.worker_id, work)
            ]
            if worker.alive and not unknown:
                assert not len(requests), f"{worker.worker_id} holds {requests.works}"
                assert not state.computations, f"{worker.worker_id} computes for nobody"
                handover_blocks = sum(
                    len(computation.blocks.hashes)
                    for computation in state.handovers.values()
                    if computation.blocks
                )
                private_blocks = sum(
                    computation.blocks.private
                    for computation in state.handovers.values()
                    if computation.blocks
                )
                assert state.cache.pinned <= handover_blocks + private_blocks, (
                    f"{worker.worker_id} keeps KV"
                )

    def _is_decided(self, worker_id: str, work: Work) -> bool:
        return (worker_id, work.request_id, work.attempt) in self._decided

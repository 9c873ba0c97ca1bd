"""The router of a simulated cluster: the core itself, fed as its agents feed it.

What it answers is carried out as the agents' outbox does: what was decided first, orders to workers
after it. A router may die in the middle of that. Another one then reads what the log holds, in the
order of `streams/agents/takeover.py`, and goes on.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.simulator.log.clock import Clock
from schemas.errors import RecordTooLarge
from schemas.records import Decision, Outcome, Phase, Retrieved, Session, TokenFrame
from streams.agents.records import end_frame, retrieved_frame, unsent_phase
from streams.agents.takeover import ORDER
from streams.core.effects import (
    Ask,
    Decide,
    Dispatch,
    Effect,
    End,
    Forget,
    GoWithout,
    SaveSession,
    Tell,
    Warm,
)
from streams.core.events import (
    Event,
    FleetRecordArrived,
    PartitionReady,
    PartitionTaken,
    Placed,
    SessionLoaded,
)
from streams.core.router import Router

ROUTER = "router-0"
PARTITION = 0  # all sessions lie there


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriers:
    """Who carries effects out; `order` raises RecordTooLarge."""

    order: Callable[[Dispatch | Warm], None]
    report: Callable[[Outcome | Phase | Retrieved], None]
    ask: Callable[[Ask], None]
    frame: Callable[[int, TokenFrame], None]
    decided: Callable[[Decision], None]
    applied: Sequence[Callable[[Event, Sequence[Effect], float], None]]  # who look on
    died: Callable[[], None]


class SimRouter:
    """One process after the other; with `keeps_log` what was written is kept, to be taken over."""

    def __init__(
        self, make: Callable[[], Router], clock: Clock, carriers: Carriers, *, keeps_log: bool
    ) -> None:
        self.alive = True
        self.epoch = 1
        self._make, self._clock, self._carriers = make, clock, carriers
        self._keeps_log = keeps_log
        self._past: defaultdict[str, list[tuple[int, Event]]] = defaultdict(list)  # by topic
        self._fleet: list[tuple[FleetRecordArrived, int]] = []  # with when it was heard of
        self._sessions: dict[str, Session] = {}
        self._count = 0
        self._read_to = 0  # what was written before that, it has read by itself
        self._seen: set[int] = set()
        self._last_sends: int | None = None  # after which it dies
        self.core = make()

    def begin(self) -> None:
        """Own the partition, of which nothing is in the log."""
        self.apply(PartitionTaken(PARTITION))
        self.apply(PartitionReady(PARTITION))

    def noted(self, topic: str, event: Event) -> Callable[[], None]:
        """An event's record stands in the log; the call delivers it."""
        if not self._keeps_log:
            return lambda: self.apply(event)
        number, self._count = self._count, self._count + 1
        self._past[topic].append((number, event))

        def deliver() -> None:
            if self.alive and number >= self._read_to:
                self._seen.add(number)
                self.apply(event)

        return deliver

    def apply(self, event: Event) -> None:
        """Take one event in, and carry out what follows."""
        now_ms = int(self._clock.now_ms)
        if self._keeps_log and isinstance(event, FleetRecordArrived):
            self._fleet.append((event, now_ms))
            if not self.alive:
                self._show(event, ())
        if not self.alive:
            return
        effects: Sequence[Effect] = self.core.apply(event, now_ms)
        if self._last_sends is not None and effects:
            effects = sorted(effects, key=lambda effect: isinstance(effect, Dispatch))
            effects = effects[: self._last_sends]
            self._end()
        self._show(event, effects)
        for effect in effects:
            self._carry_out(effect)

    def _show(self, event: Event, effects: Sequence[Effect]) -> None:
        for applied in self._carriers.applied:
            applied(event, effects, self._clock.now_ms)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Dispatch():
                self._dispatch(effect)
            case Warm():
                self._carriers.order(effect)
            case Decide(decision):
                if self._keeps_log:
                    self.noted("decisions", Placed(decision, PARTITION))
                self._carriers.decided(decision)
            case End(outcome, _, gateway_partition):
                self._carriers.report(outcome)
                last = end_frame(effect, ROUTER, int(self._clock.now_ms))
                self._carriers.frame(gateway_partition, last)
            case Ask():
                self._carriers.ask(effect)
            case GoWithout(retrieved):
                self._carriers.report(retrieved)
            case Tell(retrieved, gateway_partition):
                told = retrieved_frame(retrieved, ROUTER, int(self._clock.now_ms))
                self._carriers.frame(gateway_partition, told)
            case SaveSession(session):
                self._sessions[session.session_id] = session
            case Forget(session_id):
                self._sessions.pop(session_id, None)

    def _dispatch(self, effect: Dispatch) -> None:
        """Work that the log does not take fails, as the router's outbox has it."""
        try:
            self._carriers.order(effect)
        except RecordTooLarge as error:
            phase = unsent_phase(effect, error, int(self._clock.now_ms))
            if phase is None:
                raise
            self._carriers.report(phase)

    def die(self, sends: int) -> None:
        """Die over the next event that leads to anything, after so many of its effects."""
        self._last_sends = sends

    def _end(self) -> None:
        self.alive, self._last_sends = False, None
        self._carriers.died()

    def take_over(self) -> None:
        """Another process reads the log and goes on, also where the last one lives still."""
        assert self._keeps_log, "who is to take over needs a log"
        now_ms = int(self._clock.now_ms)
        if self.alive:
            self._end()
        self.alive = True
        self.epoch += 1
        self.core = self._make()
        for heard, at_ms in self._fleet:
            self.core.apply(heard, at_ms)
        self.core.apply(PartitionTaken(PARTITION), now_ms)
        for session in self._sessions.values():
            self.core.apply(SessionLoaded(session, PARTITION), now_ms)
        for topic in ORDER:
            for number, event in self._past[topic]:
                self.core.apply(event, now_ms)
                if number not in self._seen:
                    self._show(event, ())
        self._read_to = self._count
        self.apply(PartitionReady(PARTITION))

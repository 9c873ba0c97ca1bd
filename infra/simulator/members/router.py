"""The router of a simulated cluster: the real core, which gets events as its agents apply them.

Its effects are carried out as the agents' outbox does: decisions first, then orders to workers. A
router may die in between. Another one then reads the log, in the order of
`streams/agents/takeover.py`, and continues. Usage is written a little later, as
`streams/agents/usage.py` does; a router that dies loses the usage that it has not written.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from infra.simulator.log.clock import Clock
from schemas.errors import RecordTooLarge
from schemas.records import (
    Continued,
    Decision,
    Outcome,
    Phase,
    Retrieved,
    Session,
    TokenFrame,
    Usage,
)
from streams.agents.outbox import (
    end_frame,
    is_order,
    retrieved_frame,
    unsent_phase,
    void_frame,
    waits_for_decisions,
)
from streams.agents.takeover import ORDER
from streams.agents.usage import COMMIT_S
from streams.core.effects import (
    Decide,
    Dispatch,
    DropSession,
    Effect,
    End,
    LendRole,
    NotifyRetrieval,
    RecordUsage,
    RequestProgress,
    RestartAnswer,
    SaveSession,
    SkipRetrieval,
    StartRetrieval,
    WarmCache,
)
from streams.core.events import (
    DecisionLoaded,
    Event,
    FleetRecordArrived,
    PartitionReady,
    PartitionTaken,
    SessionLoaded,
    UsageLoaded,
)
from streams.core.requests.live import SessionKey, session_key
from streams.core.router import Router

ROUTER = "router-0"
PARTITION = 0  # the partition of all sessions
LateEvent = tuple[Event, int | None, float]  # event, its number and its arrival time


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriers:
    """Functions that carry effects out; `order` raises RecordTooLarge."""

    order: Callable[[Dispatch | WarmCache | LendRole], None]
    report: Callable[[Outcome | Phase | Retrieved | Continued], None]
    ask: Callable[[StartRetrieval], None]
    frame: Callable[[int, TokenFrame], None]
    note_decision: Callable[[Decision], None]
    note_usage: Callable[[Usage], None]
    event_listeners: Sequence[Callable[[Event, Sequence[Effect], float], None]]  # time in ms
    on_death: Callable[[], None]


class SimRouter:
    """One router process after the other; with `keeps_log`, a new one reads the kept log."""

    writes_only_while_leased = True

    def __init__(
        self, make: Callable[[], Router], clock: Clock, carriers: Carriers, *, keeps_log: bool
    ) -> None:
        self.alive = True
        self.epoch = 1
        self._make, self._clock, self._carriers = make, clock, carriers
        self._keeps_log = keeps_log
        self._events_by_topic: defaultdict[str, list[tuple[int, Event]]] = defaultdict(
            list
        )  # by topic
        self._fleet: list[tuple[FleetRecordArrived, int]] = []  # with their arrival times
        self._sessions: dict[SessionKey, Session] = {}
        self._unwritten: list[Usage] = []
        self._used = 0  # usage records that were written
        self._count = 0
        self._read_to = 0  # it has read all events with lower numbers at takeover
        self._applied_numbers: set[int] = set()
        self._last_sends: int | None = None  # number of effects after which it dies
        self._orders_first = False
        self._on_death: Callable[[], None] | None = None  # called when it has died
        self._asleep: list[LateEvent] | None = None  # events to handle when it wakes; None: awake
        self._replaced_router: tuple[Router, list[LateEvent]] | None = (
            None  # one that was replaced while it slept
        )
        self.core = make()

    def begin(self) -> None:
        """Own the partition, of which the log has nothing."""
        self.apply(PartitionTaken(PARTITION))
        self.apply(PartitionReady(PARTITION))

    @property
    def has_unwritten(self) -> bool:
        """Return whether this router, or the next one, has records to write."""
        return bool(self._unwritten) or not self.alive

    def log_event(self, topic: str, event: Event) -> Callable[[], None]:
        """Keep an event whose record is in the log; return the call that delivers it."""
        if not self._keeps_log:
            return lambda: self.apply(event)
        number, self._count = self._count, self._count + 1
        self._events_by_topic[topic].append((number, event))

        def deliver() -> None:
            if self.alive and number >= self._read_to:
                self._handle(event, number)

        return deliver

    def apply(self, event: Event) -> None:
        """Apply an event, and carry out its effects."""
        now_ms = int(self._clock.now_ms)
        if self._keeps_log and isinstance(event, FleetRecordArrived):
            self._fleet.append((event, now_ms))
            if not self.alive:
                self._notify_listeners(event, ())
        if self.alive:
            self._handle(event, None)

    def _handle(self, event: Event, number: int | None) -> None:
        """Handle one event; events of the partition have numbers."""
        if self._asleep is not None:
            self._asleep.append((event, number, self._clock.now_ms))
            return
        if number is not None:
            self._applied_numbers.add(number)
        now_ms = int(self._clock.now_ms)
        effects: Sequence[Effect] = self.core.apply(event, now_ms)
        first = _independent_orders(effects) if self._orders_first else []
        if self._last_sends is not None and (first if self._orders_first else effects):
            effects = sorted(effects, key=lambda effect: _rank(effect, first))[: self._last_sends]
            self._end()
        self._notify_listeners(event, effects)
        for effect in effects:
            self._carry_out(effect)

    def _notify_listeners(
        self, event: Event, effects: Sequence[Effect], at_ms: float | None = None
    ) -> None:
        for listener in self._carriers.event_listeners:
            listener(event, effects, self._clock.now_ms if at_ms is None else at_ms)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Dispatch():
                self._dispatch(effect)
            case WarmCache() | LendRole():
                self._carriers.order(effect)
            case Decide(decision):
                if self._keeps_log:
                    self.log_event("decisions", DecisionLoaded(decision, PARTITION))
                self._carriers.note_decision(decision)
            case End(outcome, _, gateway_partition):
                self._carriers.report(outcome)
                last = end_frame(effect, ROUTER, int(self._clock.now_ms))
                self._carriers.frame(gateway_partition, last)
            case RecordUsage(usage):
                self._use(usage)
            case StartRetrieval():
                self._carriers.ask(effect)
            case SkipRetrieval(retrieved):
                self._carriers.report(retrieved)
            case NotifyRetrieval(retrieved, gateway_partition):
                notice = retrieved_frame(retrieved, ROUTER, int(self._clock.now_ms))
                self._carriers.frame(gateway_partition, notice)
            case RequestProgress(void, gateway_partition):
                mark = void_frame(void, ROUTER, int(self._clock.now_ms))
                self._carriers.frame(gateway_partition, mark)
            case RestartAnswer(continued):
                self._carriers.report(continued)
            case SaveSession(session):
                self._sessions[session_key(session)] = session
            case DropSession(tenant, session_id):
                self._sessions.pop((tenant, session_id), None)

    def _dispatch(self, effect: Dispatch) -> None:
        """Send work; work that is too large for the log fails, as in the router's outbox."""
        try:
            self._carriers.order(effect)
        except RecordTooLarge as error:
            phase = unsent_phase(effect, error, int(self._clock.now_ms))
            if phase is None:
                raise
            self._carriers.report(phase)

    def _use(self, usage: Usage) -> None:
        if not self.alive:  # it died over this event, before it could write usage
            return
        if not self._unwritten:
            self._clock.after(COMMIT_S * 1000, lambda epoch=self.epoch: self._commit(epoch))  # type: ignore[misc]  # bound now
        self._unwritten.append(usage)

    def _commit(self, epoch: int) -> None:
        """Number and write the usage, unless another router has fenced this one."""
        if not self.alive or epoch != self.epoch:
            return
        unwritten, self._unwritten = self._unwritten, []
        for usage in unwritten:
            if self._keeps_log:
                self.log_event("usage", UsageLoaded(usage.request_id, PARTITION))
            self._carriers.note_usage(replace(usage, number=self._used))
            self._used += 1

    def die(
        self,
        sends: int,
        *,
        orders_first: bool = False,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        """Die over the next event with effects, after `sends` of them.

        With `orders_first`, die over the next event with orders that wait for no decision; these
        orders are written first.
        """
        if self.alive:  # else the next router would inherit it
            self._last_sends, self._orders_first, self._on_death = sends, orders_first, on_death

    def sleep(self) -> None:
        """Suspend the process; events wait until it wakes."""
        if self.alive and self._asleep is None:
            self._asleep = []

    @property
    def is_asleep(self) -> bool:
        return self._asleep is not None

    def wake(self) -> None:
        """Continue where the process stopped. If another router has taken over, the lease is over
        and this one writes nothing (`streams/agents/outbox.py`)."""
        if self._replaced_router is not None:
            (core, late), self._replaced_router = self._replaced_router, None
            if not self.writes_only_while_leased:
                for event, _, _ in late:
                    for effect in core.apply(event, int(self._clock.now_ms)):
                        self._carry_out(effect)
            return
        late, self._asleep = self._asleep or [], None
        for event, number, at_ms in late:
            if self.alive:
                self._handle(event, number)
            elif isinstance(event, FleetRecordArrived):  # it died over an earlier event
                self._notify_listeners(event, (), at_ms)

    def _end(self) -> None:
        late, self._asleep = self._asleep, None
        if late is not None:
            self._replaced_router = self.core, late
        self.alive, self._last_sends, self._orders_first = False, None, False
        self._unwritten.clear()
        on_death, self._on_death = self._on_death, None
        if on_death is not None:
            on_death()
        self._carriers.on_death()
        for event, _, at_ms in late or ():
            if isinstance(event, FleetRecordArrived):  # the next router has read these
                self._notify_listeners(event, (), at_ms)

    def take_over(self) -> None:
        """Let a new process read the log and continue, even if the last one is alive."""
        assert self._keeps_log, "who is to take over needs a log"
        now_ms = int(self._clock.now_ms)
        if self.alive:
            self._on_death = None
            self._end()
        self.alive = True
        self.epoch += 1
        self.core = self._make()
        for arrival, at_ms in self._fleet:
            self.core.apply(arrival, at_ms)
        self.core.apply(PartitionTaken(PARTITION), now_ms)
        for session in self._sessions.values():
            self.core.apply(SessionLoaded(session, PARTITION), now_ms)
        for topic in ORDER:
            for number, event in self._events_by_topic[topic]:
                self.core.apply(event, now_ms)
                if number not in self._applied_numbers:
                    self._applied_numbers.add(number)
                    self._notify_listeners(event, ())
        self._read_to = self._count
        self.apply(PartitionReady(PARTITION))


def _independent_orders(effects: Sequence[Effect]) -> list[Effect]:
    """Return the orders that may be written before the other effects
    (`streams/agents/outbox.py`)."""
    notified_ids = {
        effect.retrieved.request_id for effect in effects if isinstance(effect, NotifyRetrieval)
    }
    return [
        effect
        for effect in effects
        if isinstance(effect, Dispatch)
        and not waits_for_decisions(effect)
        and effect.record.request_id not in notified_ids
    ]


def _rank(effect: Effect, first: Sequence[Effect]) -> int:
    """Return the order in which effects are written when a router dies over them."""
    if not is_order(effect):
        return 1
    return 0 if any(effect is order for order in first) else 2

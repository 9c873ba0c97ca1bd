"""A whole cluster on virtual time: simulated workers and clients around the real router core.

Theory of operation. The router is `streams.core.router.Router` itself. Records reach it as the
agents would feed them: stamped with whole milliseconds, one at a time, after the log's latency;
what it answers is carried out as the agents would. Everything else (workers, links, clients) is a
model that shares no code with the router. One thread, no clock, no randomness of its own: the same
script, settings and faults give the same run. Checkers see every event with its effects; faults are
calls on the cluster at set times.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.simulator import fleet
from infra.simulator.bus import Bus, Channel
from infra.simulator.clients import Clients
from infra.simulator.clock import Clock
from infra.simulator.gateways import Gateways, SimGateway
from infra.simulator.latency import Setup
from infra.simulator.links import Links
from infra.simulator.script import Conversation, Turn
from infra.simulator.worker import Ports, SimWorker
from schemas.errors import RecordError, RecordTooLarge
from schemas.fleet import HEARTBEAT_MS
from schemas.log.membership import check_leases
from schemas.records import (
    CancelWork,
    Orchestration,
    Outcome,
    Phase,
    Request,
    Role,
    Work,
)
from schemas.rules.numbers import check_numbers
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.agents.records import unsent_phase
from streams.config import RouterSettings
from streams.core.effects import Dispatch, Effect, End
from streams.core.events import (
    Event,
    FleetRecordArrived,
    KvEventsArrived,
    OutcomeArrived,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
    ResumptionArrived,
    Tick,
)
from streams.core.placement.placer import Placer
from streams.core.placement.ppd_table import PpdTable
from streams.core.router import Router

ROUTER = "router-0"
PARTITION = 0
_LOG = LogSettings()
READY_MS = 1_000.0  # the fleet is known to the router by then: scripts begin here
KV_EVENTS_MS = 100.0  # between two batches of a worker
ORCHESTRATIONS = (
    Orchestration.PREFILL_FIRST,
    Orchestration.DECODE_FIRST,
    Orchestration.CONCURRENT,
)


class Checker(Protocol):
    """Watches a run; raises AssertionError where an invariant breaks."""

    def applied(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """The router took an event and answered with effects."""

    def finished(self, cluster: "Cluster") -> None:
        """The run is over."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to the cluster at a time; see infra/simulator/faults.py."""

    at_ms: float
    strike: Callable[["Cluster"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many workers of each kind."""

    prefill: int = 0
    decode: int = 0
    both: int = 0  # in the roles prefill and decode
    replica: int = 0

    @classmethod
    def parse(cls, name: str) -> "Shape":
        """The inverse of `name`."""
        counts = {kind: int(count) for count, kind in re.findall(r"(\d+)([PDBR])", name)}
        return cls(
            prefill=counts.get("P", 0),
            decode=counts.get("D", 0),
            both=counts.get("B", 0),
            replica=counts.get("R", 0),
        )

    @property
    def name(self) -> str:
        """Such as 2P2D, 4B or 1P1D2R."""
        kinds = (("P", self.prefill), ("D", self.decode), ("B", self.both), ("R", self.replica))
        return "".join(f"{count}{kind}" for kind, count in kinds if count)

    def roles(self) -> list[tuple[str, tuple[Role, ...]]]:
        """Worker ids with their roles."""
        kinds = (
            ("prefill", (Role.PREFILL,), self.prefill),
            ("decode", (Role.DECODE,), self.decode),
            ("both", (Role.PREFILL, Role.DECODE), self.both),
            ("replica", (Role.REPLICA,), self.replica),
        )
        return [(f"{name}-{i}", roles) for name, roles, count in kinds for i in range(count)]


class Cluster:
    """One router, its workers and its clients."""

    def __init__(
        self,
        shape: Shape,
        setup: Setup,
        settings: RouterSettings,
        *,
        timeout_ms: int = 30_000,
        conversations_max: int = 0,
        weights: tuple[float, float] = (-1.0, -1.0),
        table: PpdTable | None = None,
        placer: Placer | None = None,  # chooses workers in the router's place
        gateways: int = 0,  # that take the calls in turn; 0: nobody, who never dies
        record_bytes_max: int = 0,  # the broker's limit; 0: any size passes
        orchestrations: tuple[Orchestration, ...] = ORCHESTRATIONS,
        checkers: Sequence[Checker] = (),
        faults: Sequence[Fault] = (),
    ) -> None:
        self.clock = Clock()
        self.setup = setup
        self.bus = Bus(self.clock, setup.bus_ms, record_bytes_max)
        self.links = Links(self.clock, setup)
        self.router = Router(ROUTER, settings, table, placer)
        self.clients = Clients(
            self.clock,
            self._request,
            hop_ms=setup.bus_ms,
            timeout_ms=timeout_ms,
            conversations_max=conversations_max,
            weights=weights,
        )
        self.gateways = Gateways(self.clock, gateways)
        self.workers: dict[str, SimWorker] = {}
        self.checkers = list(checkers)
        self._orchestrations = orchestrations
        self._tick_ms = settings.tick_ms
        self.buried = 0  # forged records that nobody could read
        self.forged_texts: dict[str, tuple[Conversation, Turn]] = {}  # of requests nobody made
        self._beats = 0
        self._kv_seqs: dict[str, int] = {}
        self._kv_due: set[str] = set()
        self._apply(PartitionTaken(PARTITION))
        self._apply(PartitionReady(PARTITION))
        self._start(shape)
        for fault in faults:
            self.clock.at(fault.at_ms, lambda fault=fault: fault.strike(self))  # type: ignore[misc]  # bound now

    def _start(self, shape: Shape) -> None:
        ports = Ports(
            phase=self._phase,
            outcome=self._outcome,
            token=self.clients.token,
            changed=self._changed,
            said=lambda name: self.forged_texts.get(name) or self.clients.said(name),
        )
        self._to_fleet(fleet.router_registration(ROUTER))
        for gateway in self.gateways.living:
            self.introduce_gateway(gateway)
        for partition, (worker_id, roles) in enumerate(shape.roles()):
            worker = SimWorker(
                worker_id,
                roles,
                partition,
                self.clock,
                self.setup,
                self.links,
                ports,
                self.workers,
            )
            self.workers[worker_id] = worker
            self.introduce(worker)
        self.clock.after(0.0, self._beat)
        self.clock.after(self._tick_ms, self._tick)

    def introduce(self, worker: SimWorker) -> None:
        """A worker's life begins: it registers and tells what its cache holds."""
        self._to_fleet(fleet.registration(worker, self._orchestrations))
        self._kv_seqs[worker.worker_id] = 0
        self._tell_blocks(worker)

    def introduce_gateway(self, gateway: SimGateway) -> None:
        """A gateway joins the fleet, in this process or epoch."""
        self._to_fleet(gateway.registration())

    def resume(self, request: Request) -> None:
        """A client goes on reading an answer at another gateway, if it has not ended."""
        if not self.clients.reads(request.request_id):
            return
        resumption = self.gateways.resume(request)
        self.write("cancellations", resumption, ResumptionArrived(resumption, PARTITION))

    def run(self, conversations: Sequence[Conversation]) -> None:
        """Serve the conversations to their ends; may be called again, later in virtual time."""
        self.clients.start(conversations)
        while self.clients.open and self.clock.step():
            pass

    def finish(self) -> None:
        """Have the checkers say their last word."""
        for checker in self.checkers:
            checker.finished(self)

    # What the router is told, and what it answers

    def _apply(self, event: Event) -> None:
        effects = self.router.apply(event, int(self.clock.now_ms))
        for checker in self.checkers:
            checker.applied(event, effects, self.clock.now_ms)
        for effect in effects:
            if isinstance(effect, Dispatch):
                self._dispatch(effect)
            elif isinstance(effect, End):
                self._outcome(effect.outcome)

    def _dispatch(self, effect: Dispatch) -> None:
        """Tell a worker; work that the log does not take fails, as the router's outbox has it."""
        there = _LOG.partitions(TOPICS[effect.topic].group)
        assert 0 <= effect.partition < there, "no producer sends to a partition that is not there"
        try:
            self.order((effect.topic, effect.partition), effect.record)
        except RecordTooLarge as error:
            phase = unsent_phase(effect, error, int(self.clock.now_ms))
            if phase is None:
                raise
            self._phase(phase)

    def order(self, channel: Channel, record: Work | CancelWork) -> None:
        """Tell a worker, if there is one of the name; raises RecordTooLarge."""
        worker = self.workers.get(record.worker_id)
        if worker is None:  # somebody made the router believe in it
            self.bus.send(channel, record, lambda: None)
        elif isinstance(record, Work):
            self.bus.send(channel, record, lambda: worker.take(record))
        elif isinstance(record, CancelWork):
            self.bus.send(channel, record, lambda: worker.cancel(record))

    def _request(self, request: Request) -> None:
        """The gateway accepts it, or tells the one client whose request is too large."""
        request = self.gateways.accept(request)
        try:
            self.write("requests", request, RequestArrived(request, PARTITION))
        except RecordTooLarge:
            self.clients.refused(request.request_id)

    def _phase(self, phase: Phase) -> None:
        self.write("phases", phase, PhaseArrived(phase, PARTITION))

    def _outcome(self, outcome: Outcome) -> None:
        self.write("outcomes", outcome, OutcomeArrived(outcome, PARTITION))
        self.bus.send(("tokens", PARTITION), outcome, lambda: self._ended(outcome))

    def _ended(self, outcome: Outcome) -> None:
        self.gateways.ended(outcome.request_id)
        self.clients.ended(outcome)

    def _to_fleet(self, record: fleet.FleetRecord) -> None:
        offset = self.bus.sent("fleet", PARTITION)
        self.write("fleet", record, FleetRecordArrived(record, offset))

    def write(self, topic: str, record: object, event: Event) -> None:
        """Put a record into the log that is an event to the router; raises RecordTooLarge."""
        self.bus.send((topic, PARTITION), record, lambda: self._apply(event))

    def forge(self, topic: str, record: object, event: Event) -> None:
        """The same of one that nobody here wrote: it is checked as the agents do, or buried."""
        self.bus.send((topic, PARTITION), record, lambda: self._read(record, event))

    def _read(self, record: object, event: Event) -> None:
        try:
            check_numbers(record)
            check_leases(record, _LOG)
        except RecordError:
            self.buried += 1
            return
        self._apply(event)

    def _beat(self) -> None:
        """All members beat together; the dead do not."""
        self._beats += 1
        self._to_fleet(fleet.router_heartbeat(ROUTER, self._beats, self.clock.now_ms))
        for gateway in self.gateways.living:
            self._to_fleet(gateway.heartbeat(self._beats, self.clock.now_ms))
        for worker in self.workers.values():
            if worker.alive:
                self._to_fleet(fleet.heartbeat(worker, self._beats, ROUTER))
        self.clock.after(HEARTBEAT_MS, self._beat)

    def _tick(self) -> None:
        self._apply(Tick())
        self.clock.after(self._tick_ms, self._tick)

    def _changed(self, worker: SimWorker) -> None:
        """Publish what a worker caches, not more often than once in a while."""
        if worker.worker_id not in self._kv_due:
            self._kv_due.add(worker.worker_id)
            self.clock.after(KV_EVENTS_MS, lambda: self._tell_blocks(worker))

    def _tell_blocks(self, worker: SimWorker) -> None:
        self._kv_due.discard(worker.worker_id)
        if not worker.alive:
            return
        seq = self._kv_seqs[worker.worker_id]
        self._kv_seqs[worker.worker_id] = seq + 1
        record = fleet.kv_events(worker, seq)
        offset = self.bus.sent("prefixes", PARTITION)
        self.write("prefixes", record, KvEventsArrived(record, offset))

"""A whole cluster on virtual time: simulated workers and clients around the real router core.

Theory of operation. The router is `streams.core.router.Router` itself. It gets records as the
agents would apply them: stamped with whole milliseconds, one at a time, after the log's latency.
Its effects are carried out as the agents would. Workers serve by the rules of `workers/`, and
gateways assemble answers by those of `streams/gateway`. Engines, links, the log and clients are
models that share no code with these. There is one thread, no clock, and no randomness of its own:
the same script, settings and faults give the same run. Checkers see every event with its effects,
and every record that is written. Faults are calls on the cluster at set times.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from infra.simulator.log.bus import Bus, Channel
from infra.simulator.log.clock import Clock
from infra.simulator.machine.gpu import SimGpu
from infra.simulator.machine.kv_exchange import KvLinks, KvMove, SimKvExchange
from infra.simulator.machine.latency import Setup
from infra.simulator.members.clients import ClientRequest, Clients
from infra.simulator.members.gateways import Gateways
from infra.simulator.members.membership import SimMembership
from infra.simulator.members.router import PARTITION, ROUTER, Carriers, SimRouter
from infra.simulator.members.searches import SimRetrievalPool
from infra.simulator.members.worker import SimWorker
from infra.simulator.members.worker_process import Ports
from infra.simulator.models import OneModel
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.script import SimConversation
from schemas.errors import RecordTooLarge
from schemas.records import (
    AssignRoles,
    CancelWork,
    Continued,
    Orchestration,
    Outcome,
    Phase,
    Request,
    Retrieved,
    Role,
    TokenFrame,
    WarmPrefix,
    Work,
)
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.config import RouterSettings
from streams.core.effects import Dispatch, Effect, LendRole, StartRetrieval, WarmCache
from streams.core.events import (
    ContinuedArrived,
    Event,
    OutcomeArrived,
    PhaseArrived,
    RequestArrived,
    RetrievedArrived,
    Tick,
)
from streams.core.placement.placer import Placer
from streams.core.placement.ppd_table import PpdTable
from streams.core.router import Router
from workers.llm.engine import Job

_LOG = LogSettings()
READY_MS = 1_000.0  # the router knows the fleet by then; scripts begin here
_ARRIVALS: dict[type, Callable[[Any, int], Event]] = {  # of records on the topic of phases
    Phase: PhaseArrived,
    Retrieved: RetrievedArrived,
    Continued: ContinuedArrived,
}
ORCHESTRATIONS = (
    Orchestration.PREFILL_FIRST,
    Orchestration.DECODE_FIRST,
    Orchestration.CONCURRENT,
)


class Checker:
    """Observes a run through the methods that it overrides; raises AssertionError if an invariant
    breaks."""

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Handle an event that the router applied, and its effects."""

    def on_router_death(self) -> None:
        """Note that the router died; later events go to another router, which has read the log."""

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Handle a record that was written to the log."""

    def on_kv_move(self, move: KvMove) -> None:
        """Handle the start or the end of a KV transfer between two engines."""

    def on_tokens(self, request: ClientRequest, tokens: Sequence[int], text: str) -> None:
        """Handle the next tokens of an answer that a client received."""

    def on_tick(self, cluster: "Cluster") -> None:
        """Check the state of the cluster; called at every tick of the router."""

    def on_finish(self, cluster: "Cluster") -> None:
        """Check what must hold at the end of the run."""


class SimFault:
    """A fault that strikes the cluster at a set time: a call with the cluster and arguments."""

    def __init__(self, at_ms: float, strike: Callable[..., None], *arguments: Any) -> None:
        self.at_ms, self.strike, self.arguments = at_ms, strike, arguments


class Cluster:
    """One router, its workers and its clients."""

    def __init__(
        self,
        shape: ClusterShape,
        setup: Setup,
        settings: RouterSettings,
        *,
        timeout_ms: int = 30_000,
        conversations_max: int = 0,
        weights: tuple[float, float] = (-1.0, -1.0),
        table: PpdTable | None = None,
        placer: Placer | None = None,  # replaces the router's own
        gateways: int = 0,  # take calls in turn; 0: one that is no member and never dies
        record_bytes_max: int = 0,  # the broker's limit; 0: any size passes
        orchestrations: tuple[Orchestration, ...] = ORCHESTRATIONS,
        keeps_log: bool = False,  # a router that takes over reads it
        searches_seed: int | None = None,  # None: no request wants retrieval
        probes: bool = False,  # some requests also search during their answers
        models: OneModel | None = None,  # what workers serve; None: one model
        checkers: Sequence[Checker] = (),
        faults: Sequence[SimFault] = (),
    ) -> None:
        self.clock = Clock()
        self.setup, self.shape, self.models = setup, shape, models or OneModel()
        self.bus = Bus(self.clock, setup.bus_ms, record_bytes_max)
        self.links = KvLinks(self.clock, setup)
        self.router = SimRouter(
            lambda: Router(ROUTER, settings, table, placer),
            self.clock,
            Carriers(
                order=self._order,
                report=self._report,
                ask=self._ask,
                frame=self._frame,
                note_decision=lambda decision: self.bus.note("decisions", decision),
                note_usage=lambda usage: self.bus.note("usage", usage),
                event_listeners=_listeners(checkers, "on_event"),
                on_death=self._router_died,
            ),
            keeps_log=keeps_log,
        )
        self.searches = SimRetrievalPool(
            self.clock, searches_seed or 0, self._report, probes=probes
        )
        token_listeners = _listeners(checkers, "on_tokens")
        self.clients = Clients(
            self.clock,
            self._request,
            token_listeners,
            timeout_ms=timeout_ms,
            conversations_max=conversations_max,
            weights=weights,
            wants=self.searches.wants if searches_seed is not None else lambda request_id: False,
            probing=self.searches.probing,
        )
        self.gateways = Gateways(
            *(self.clock, gateways, self.clients.on_answer, self._report),
            wants_ids=bool(token_listeners),
        )
        self.exchange = SimKvExchange(self.clock, setup, self.links)
        self.members = SimMembership(
            self.clock, self.router, self.gateways, orchestrations, self._send_numbered
        )
        self.workers = self.members.workers
        self.checkers = list(checkers)
        self.bus.record_listeners = _listeners(checkers, "on_record")
        self.exchange.move_listeners = _listeners(checkers, "on_kv_move")
        self._tick_listeners = _listeners(checkers, "on_tick")
        self._tick_ms = settings.tick_ms
        self._unread: set[tuple[str, int]] = set()  # outcomes that the router has not read yet
        self.router.begin()
        self._start(shape)
        for fault in faults:
            self.clock.at(fault.at_ms, partial(fault.strike, self, *fault.arguments))

    def _start(self, shape: ClusterShape) -> None:
        self.members.join_router()
        for gateway in self.gateways.living:
            self.members.join_gateway(gateway)
        for partition, (worker_id, roles) in enumerate(shape.roles()):
            worker = self.make_worker(worker_id, roles, partition)
            self.workers[worker_id] = worker
            self.members.join(worker)
        self.clock.after(0.0, self.members.beat)
        self.clock.after(self._tick_ms, self._tick)

    def make_worker(self, worker_id: str, roles: tuple[Role, ...], partition: int) -> SimWorker:
        """Return a worker that has not joined the fleet yet."""
        ports = Ports(
            frame=self._frame,
            report=self._report,
            probe=self.searches.probe,
            blocks_changed=self.members.blocks_changed,
            ack_ms=self.setup.ack_ms,
        )
        return SimWorker(
            worker_id,
            roles,
            partition,
            self.clock,
            self.exchange,
            self._hashes,
            self.members.peer_view_of(worker_id),
            ports,
            self.gpu_of(worker_id),
            self.models.first(worker_id),
        )

    def gpu_of(self, worker_id: str) -> Callable[..., SimGpu]:
        """Return the constructor of a worker's GPU."""
        return SimGpu

    def _hashes(self, job: Job) -> list[int]:
        """Return the block hashes of a job's prompt and answer."""
        request_id = job.request_id.rpartition(".")[0]
        plain = job.prompt_tokens[: len(job.prompt_tokens) - job.prior_tokens]
        return self.clients.hashes(request_id, plain, self.setup.block_tokens, job.cache_scope)

    def run(self, conversations: Sequence[SimConversation]) -> None:
        """Serve the conversations to their ends. May be called again, later in virtual time."""
        self.clients.start(conversations)
        while self.is_busy and self.clock.step():
            pass

    @property
    def is_busy(self) -> bool:
        """Return whether a client waits, or the router has records to read or to write."""
        return bool(self.clients.open or self._unread) or self.router.has_unwritten

    def pass_ms(self, passed_ms: float) -> None:
        """Advance the virtual clock by a number of milliseconds."""
        over: list[bool] = []
        self.clock.after(passed_ms, lambda: over.append(True))
        while not over and self.clock.step():
            pass

    def finish(self) -> None:
        """Run the final checks of all checkers."""
        for checker in self.checkers:
            checker.on_finish(self)

    # The router's events and effects

    def _router_died(self) -> None:
        for checker in self.checkers:
            checker.on_router_death()

    def _order(self, effect: Dispatch | WarmCache | LendRole) -> None:
        there = _LOG.partitions(TOPICS[effect.topic].group)
        assert 0 <= effect.partition < there, "no producer sends to a partition that is not there"
        self.order((effect.topic, effect.partition), effect.record)

    def order(
        self,
        channel: Channel,
        record: Work | CancelWork | WarmPrefix | AssignRoles,
        *,
        forged: bool = False,
    ) -> None:
        """Send an order to the worker that it names; raises RecordTooLarge."""
        worker = self.workers.get(record.worker_id)

        def deliver() -> None:
            if worker is None:  # a forged registration invented it
                return
            if isinstance(record, Work):
                worker.process.take(record)
            elif isinstance(record, WarmPrefix):
                worker.process.warm(record)
            elif isinstance(record, AssignRoles):
                self.members.assign(worker, record)
            else:
                worker.process.cancel(record)

        self.bus.send(channel, record, deliver, forged=forged)

    def _request(self, request: Request) -> None:
        """Accept a request at its gateway, or refuse it if it is too large for the log."""
        request = self.gateways.accept(request)
        try:
            self.write("requests", request, RequestArrived(request, PARTITION))
        except RecordTooLarge:
            self.gateways.refuse(request)
            self.clients.refuse(request.request_id)

    def _ask(self, ask: StartRetrieval) -> None:
        epoch, router = self.router.epoch, self.router
        self.searches.ask(ask, lambda: router.alive and router.epoch == epoch)

    def _report(self, record: Phase | Outcome | Retrieved | Continued) -> None:
        if not isinstance(record, Outcome):
            self.write("phases", record, _ARRIVALS[type(record)](record, PARTITION))
            return
        self.clients.on_outcome(record)
        apply = self.router.log_event("outcomes", OutcomeArrived(record, PARTITION))
        name = record.request_id, record.attempt
        self._unread.add(name)

        def deliver() -> None:
            self._unread.discard(name)
            apply()

        self.bus.send(("outcomes", PARTITION), record, deliver)

    def _frame(self, partition: int, frame: TokenFrame) -> None:
        def deliver() -> None:
            self.clients.rows(frame)
            self.gateways.frame(partition, frame)

        self.bus.send(("tokens", partition), frame, deliver)

    def write(self, topic: str, record: object, event: Event) -> None:
        """Write a record and apply its event at the router; raises RecordTooLarge."""
        self.bus.check(record)  # before `log_event` keeps it for later routers
        self.bus.send((topic, PARTITION), record, self.router.log_event(topic, event))

    def _send_numbered(self, topic: str, record: object, deliver: Callable[[int], None]) -> None:
        offset = self.bus.next_offset(topic, PARTITION)
        self.bus.send((topic, PARTITION), record, lambda: deliver(offset))

    def _tick(self) -> None:
        self.router.apply(Tick())
        self.gateways.sweep()
        for listener in self._tick_listeners:
            listener(self)
        self.clock.after(self._tick_ms, self._tick)


def _listeners(checkers: Sequence[Checker], name: str) -> list[Any]:
    """Return these methods of the checkers that have one of their own."""
    return [
        getattr(checker, name)
        for checker in checkers
        if getattr(type(checker), name) is not getattr(Checker, name)
    ]

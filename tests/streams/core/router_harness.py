"""A router with a fleet that the test plays by hand, and independent books over what it may do.

The books know nothing of the core's tables: they count credits, outcomes and attempts from effects
and records alone, and fail the test at once where an invariant breaks.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from schemas.fleet import LEASE_MS
from schemas.records import (
    Cancellation,
    CancelWork,
    Continued,
    Decision,
    DecisionKind,
    Load,
    MemberKind,
    MemberState,
    Orchestration,
    Outcome,
    Passage,
    Phase,
    PhaseKind,
    Registration,
    Request,
    Retrieved,
    Role,
    StreamRetrieved,
    StreamVoid,
    Usage,
    WarmPrefix,
    Work,
    WorkPhase,
)
from schemas.rules.tokens import pack_tokens
from streams.config import RouterSettings
from streams.core.effects import (
    Decide,
    Dispatch,
    Effect,
    End,
    NotifyRetrieval,
    RecordUsage,
    RequestProgress,
    RestartAnswer,
    SkipRetrieval,
    StartRetrieval,
    WarmCache,
)
from streams.core.events import (
    CancellationArrived,
    ContinuedArrived,
    DecisionLoaded,
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
    ResumptionArrived,
    RetrievedArrived,
    Tick,
    UsageLoaded,
)
from streams.core.router import Router
from tests.streams import builders
from tests.streams.builders import ROUTER, T0
from tests.streams.core.hand_played import HandPlayedGateway, HandPlayedWorker

PARTITION = 0


class RouterHarness:
    """Feeds one router, keeps the log and checks the books."""

    def __init__(self, *, says_at_once: bool = True, **settings: Any) -> None:
        """With `says_at_once` readers of answers whose attempts are void have nothing yet."""
        self.says_at_once = says_at_once
        self.marks: list[StreamVoid] = []  # of attempts that were given up
        self.voids: list[StreamVoid] = []  # those of which no reader has said anything
        self.settings = RouterSettings(**{"policy": "static", **settings})
        self.router = Router(ROUTER, self.settings)
        self.twin = Router(ROUTER, self.settings)
        self.now_ms = T0
        self.workers: dict[str, HandPlayedWorker] = {}
        self.gateways: dict[str, HandPlayedGateway] = {}
        self.log: list[Event] = []  # everything about the partition, decisions included
        self.clocks_ms: dict[str, int] = {}  # over the broker's, by member
        self.fleet_log: list[tuple[FleetRecordArrived, int]] = []
        self.works: list[Work] = []
        self.cancels: list[CancelWork] = []
        self.decisions: list[Decision] = []
        self.outcomes: dict[str, Outcome] = {}
        self.used: dict[str, Usage] = {}
        self.accepted: dict[str, Request] = {}
        self.attempts: dict[str, int] = {}
        self.prompts: dict[str, bytes] = {}
        self.asks: list[StartRetrieval] = []
        self.warms: list[WarmPrefix] = []
        self.notices: list[StreamRetrieved] = []
        self.on_the_way: list[Retrieved | Continued] = []  # written, and not read yet
        self._beats = 0
        self.apply(PartitionTaken(PARTITION))
        self.apply(PartitionReady(PARTITION))

    def apply(self, event: Event) -> list[Effect]:
        """One event into the router and its twin, which has to do the same."""
        effects = self.router.apply(event, self.now_ms)
        assert self.twin.apply(event, self.now_ms) == effects
        for effect in effects:
            self._check_place(effect)
            self._account(effect)
        while self.says_at_once and self.voids:
            void = self.voids.pop(0)
            effects = effects + self.report_progress(void.request_id, void.attempt)
        return effects

    def _check_place(self, effect: Effect) -> None:
        """What is written of a request lies where that lies, for its reader, and names it."""
        if not isinstance(effect, Dispatch | WarmCache):
            assert getattr(effect, "partition", PARTITION) == PARTITION
        for record in (getattr(effect, field.name) for field in fields(effect)):
            if (request := self.accepted.get(getattr(record, "request_id", ""))) is not None:
                assert getattr(record, "session_id", request.session_id) == request.session_id
                reader = request.gateway_partition
                assert getattr(effect, "gateway_partition", reader) == reader

    def _account(self, effect: Effect) -> None:
        match effect:
            case Dispatch(topic, partition, Work() as work):
                self._dispatched(topic, partition, work)
            case Dispatch(_, _, CancelWork() as cancel):
                self._cancelled(cancel)
            case Decide(decision, partition):
                assert (decision.router_id, decision.at_ms) == (ROUTER, self.now_ms)
                self.decisions.append(decision)
                self.log.append(DecisionLoaded(decision, partition))
                if decision.kind in (DecisionKind.PLACE, DecisionKind.REPLACE):
                    self.attempts[decision.request_id] = decision.attempt
                    self._check_void(decision.request_id)
            case WarmCache(topic, partition, record):
                worker = self.workers[record.worker_id]
                assert (topic, partition) == (worker.topic, worker.partition)
                assert worker.epoch == record.worker_epoch
                self.warms.append(record)
            case StartRetrieval():
                assert effect.request.request_id not in self.outcomes, "a search for nobody"
                self.asks.append(effect)
            case SkipRetrieval(retrieved):
                assert (retrieved.router_id, retrieved.at_ms) == (ROUTER, self.now_ms)
                self.on_the_way.append(retrieved)
            case RequestProgress(void):
                self.marks.append(void)
                self.voids += [void] if void.asks else []
            case RestartAnswer(continued):
                self.on_the_way.append(continued)
            case NotifyRetrieval(retrieved):
                self.notices.append(retrieved)
            case End(outcome, partition):
                self._check_void(outcome.request_id)
                self._end(outcome)
                self.log.append(OutcomeArrived(outcome, partition))
            case RecordUsage(usage, partition):
                assert usage.request_id not in self.used, "usage twice"
                self.used[usage.request_id] = usage
                self.log.append(UsageLoaded(usage.request_id, partition))

    def _dispatched(self, topic: str, partition: int, work: Work) -> None:
        worker = self.workers[work.worker_id]
        assert work.request_id not in self.outcomes, "work after the outcome"
        assert work.worker_epoch == worker.epoch, "work for an earlier life"
        assert self.now_ms - worker.seen_ms <= LEASE_MS, "work for a silent worker"
        if work.orchestration is not Orchestration.DECODE_FIRST or worker.role is Role.DECODE:
            assert worker.state is MemberState.READY, "work for a worker that drains or is gone"
        request = self.accepted[work.request_id]
        assert (work.model, work.adapter) == (request.model, request.adapter)
        assert work.model == worker.model, "work for a worker of another model"
        assert work.adapter in ("", *worker.adapters), "work with an adapter that it cannot load"
        assert topic == worker.topic
        assert (work.phase is WorkPhase.PREFILL) == (worker.role is Role.PREFILL)
        assert partition == worker.partition
        assert work.attempt == self.attempts[work.request_id]
        assert (work.router_id, work.dispatched_ms) == (ROUTER, self.now_ms)
        self._check_prompt(work)
        self.works.append(work)
        worker.take(work)

    def _check_prompt(self, work: Work) -> None:
        """A request has one prompt, and its reader knew of it before."""
        plain = work.prompt_tokens[: len(work.prompt_tokens) - 4 * work.prior_tokens]
        prompt = self.prompts.setdefault(work.request_id, plain)
        assert plain == prompt, "another prompt in another attempt"
        if self.accepted[work.request_id].retrieval is not None:
            own_notices = [
                notice for notice in self.notices if notice.request_id == work.request_id
            ]
            search_notices = [notice for notice in own_notices if not notice.probe]
            assert search_notices, "work before its reader was told"
            assert search_notices.count(search_notices[0]) == len(search_notices), (
                "its reader was told otherwise"
            )

    def _cancelled(self, cancel: CancelWork) -> None:
        """A void order frees at once: a worker reads it before any work that is sent later."""
        self.cancels.append(cancel)
        key = (cancel.request_id, cancel.attempt)
        assert cancel.void or cancel.request_id not in self.outcomes, "its end would be the second"
        if cancel.void:
            self.workers[cancel.worker_id].holds.pop(key, None)

    def _check_void(self, request_id: str) -> None:
        """Before a request is placed again or ended, nobody who lives holds it any more."""
        for worker in self.workers.values():
            if self.now_ms - worker.seen_ms <= LEASE_MS:
                held_keys = [key for key in worker.holds if key[0] == request_id]
                assert not held_keys, f"{worker.worker_id} goes on with {held_keys}"

    def _end(self, outcome: Outcome) -> None:
        assert outcome.request_id not in self.outcomes, "a second outcome"
        self.outcomes[outcome.request_id] = outcome

    # What the surroundings do

    def worker(
        self, worker_id: str, role: Role, window: int = 2, **changes: Any
    ) -> HandPlayedWorker:
        """A worker starts, or starts again; `can` are the orchestrations that its engine lists."""
        previous = self.workers.get(worker_id)
        epoch = previous.epoch + 1 if previous else 1
        partition = previous.partition if previous else len(self.workers)
        if previous is not None:
            for name in ("can", "model", "adapters", "loaded"):
                changes.setdefault(name, getattr(previous, name))
        worker = HandPlayedWorker(worker_id, role, partition, window, epoch=epoch, **changes)
        self.workers[worker_id] = worker
        record = builders.registration(
            worker_id,
            role,
            epoch=epoch,
            partition=worker.partition,
            started_ms=self.now_ms,
            capability=builders.capability(
                worker_id,
                *worker.can,
                block_size=16 if worker.can else 1,
                model=worker.model,
                adapters=worker.adapters,
                adapters_max=2,
            ),
        )
        self.fleet(record)
        self.beat(worker)
        return worker

    def gateway(self, gateway_id: str, *, same_process: bool = False) -> HandPlayedGateway:
        """A gateway starts, starts again, or joins again in the same process."""
        previous = self.gateways.get(gateway_id)
        started_ms = previous.started_ms if previous and same_process else self.now_ms
        gateway = HandPlayedGateway(gateway_id, started_ms, previous.epoch + 1 if previous else 1)
        self.gateways[gateway_id] = gateway
        self.fleet(
            builders.registration(
                gateway_id, epoch=gateway.epoch, kind=MemberKind.GATEWAY, started_ms=started_ms
            )
        )
        self.beat_gateway(gateway)
        return gateway

    def beat_gateway(self, gateway: HandPlayedGateway, **changes: Any) -> None:
        """One heartbeat."""
        gateway.seq += 1
        name, epoch = gateway.gateway_id, gateway.epoch
        self.fleet(builders.beat(name, gateway.seq, epoch=epoch, **changes))

    def asked_at(self, gateway: HandPlayedGateway, request_id: str, **changes: Any) -> list[Effect]:
        """A request arrives that this process accepted."""
        accepted = {"gateway_id": gateway.gateway_id, "gateway_started_ms": gateway.started_ms}
        return self.request(request_id, **{**accepted, **changes})

    def resume(self, request_id: str, gateway: HandPlayedGateway) -> list[Effect]:
        """The client goes on reading at a gateway."""
        resumption = builders.resumption(
            request_id, gateway.gateway_id, gateway.started_ms, at_ms=self.now_ms
        )
        return self.record(ResumptionArrived(resumption, PARTITION))

    def fleet(self, record: Any) -> None:
        """One fleet record arrives."""
        ahead_ms = self.clocks_ms.get(record.member_id, 0)
        event = FleetRecordArrived(record, len(self.fleet_log), ahead_ms)
        self.fleet_log.append((event, self.now_ms))
        self.apply(event)

    def beat(self, worker: HandPlayedWorker) -> None:
        """One heartbeat, with the worker's window granted."""
        worker.seen_ms = self.now_ms
        worker.seq += 1
        self.fleet(
            builders.beat(
                worker.worker_id,
                worker.seq,
                {worker.role: worker.window},
                epoch=worker.epoch,
                state=worker.state,
                load=Load(adapters=worker.loaded),
            )
        )

    def pass_ms(self, passed_ms: int) -> None:
        """Time passes in ticks; whoever is not silent beats."""
        end_ms = self.now_ms + passed_ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, self.now_ms + 250)
            self._beats += 1
            self.fleet(self._router_record())
            for worker in self.workers.values():
                if not worker.silent:
                    self.beat(worker)
            for gateway in self.gateways.values():
                if not gateway.silent:
                    self.beat_gateway(gateway)
            self.apply(Tick())
            self._expire_lost()

    def _router_record(self) -> Any:
        if self._beats == 1:
            return Registration(
                member_id=ROUTER, epoch=1, kind=MemberKind.ROUTER, started_ms=self.now_ms
            )
        return builders.beat(ROUTER, self._beats)

    def _expire_lost(self) -> None:
        for worker in self.workers.values():
            if self.now_ms - worker.seen_ms > LEASE_MS:
                worker.holds.clear()

    def request(self, request_id: str, tokens: int = 10, **changes: Any) -> list[Effect]:
        """A request arrives now."""
        request = builders.request(
            request_id,
            tokens,
            **{"arrived_ms": self.now_ms, "deadline_ms": self.now_ms + 60_000, **changes},
        )
        self.accepted[request_id] = request
        return self.record(RequestArrived(request, PARTITION))

    def record(self, event: Any) -> list[Effect]:
        """A record of the partition arrives."""
        self.log.append(event)
        return self.apply(event)

    def cancel(self, request_id: str, **changes: Any) -> list[Effect]:
        """The client gives a request up."""
        cancellation: Cancellation = builders.cancellation(request_id, at_ms=self.now_ms, **changes)
        return self.record(CancellationArrived(cancellation, PARTITION))

    def retrieved(self, request_id: str, *passages: Passage, **changes: Any) -> list[Effect]:
        """A router has written what was found for a request, as it was asked."""
        history = [ask.history for ask in self.asks if ask.request.request_id == request_id]
        changes.setdefault("history", history[-1] if history else ())
        retrieved = builders.retrieved(request_id, *passages, **changes)
        return self.record(RetrievedArrived(retrieved, PARTITION))

    def probed(self, work: Work, probe: int, *passages: Passage, **changes: Any) -> list[Effect]:
        """The worker of the work has written what became of a probe."""
        tokens = b"".join(passage.tokens for passage in passages)
        probe_fields = {"attempt": work.attempt, "probe": probe, "seq": 8 * probe, "tokens": tokens}
        return self.retrieved(
            work.request_id, *passages, **{"history": (), **probe_fields, **changes}
        )

    def report_progress(
        self, request_id: str, attempt: int, *tokens: int, chars: int = 0, **changes: Any
    ) -> list[Effect]:
        """A gateway has written how much there is of an answer."""
        continued = builders.continued(
            request_id, attempt, tokens=pack_tokens(tokens), chars=chars, **changes
        )
        return self.record(ContinuedArrived(continued, PARTITION))

    def read(self) -> list[Effect]:
        """What the router itself wrote is read back."""
        effects: list[Effect] = []
        while self.on_the_way:
            record = self.on_the_way.pop(0)
            if isinstance(record, Continued):
                effects += self.record(ContinuedArrived(record, PARTITION))
            else:
                effects += self.record(RetrievedArrived(record, PARTITION))
        return effects

    def phase(self, work: Work, kind: PhaseKind, **changes: Any) -> list[Effect]:
        """The worker of the work says this of it, whether a real one could or not."""
        phase: Phase = builders.phase(work, kind, self.now_ms, **changes)
        self.workers[work.worker_id].say(work, kind)
        return self.record(PhaseArrived(phase, PARTITION))

    def outcome(self, work: Work, **changes: Any) -> list[Effect]:
        """The worker of the work ends it, whether a real one could or not."""
        outcome = builders.outcome(work, self.now_ms, **changes)
        has_ended = work.request_id in self.outcomes
        self.workers[work.worker_id].end(work)
        if not has_ended and outcome.attempt >= self.attempts[work.request_id]:
            self._end(outcome)
        effects = self.record(OutcomeArrived(outcome, PARTITION))
        if work.request_id in self.outcomes:
            self._check_void(work.request_id)
        return effects

    def rebuilt(self, log: Sequence[Event] | None = None) -> Router:
        """A new router that takes the partition over, with a fleet that grants it nothing new."""
        router = Router(ROUTER, self.settings)
        for event, at_ms in self.fleet_log:
            record = event.record
            if not isinstance(record, Registration):
                record = replace(record, grants=())
            router.apply(replace(event, record=record), at_ms)
        router.apply(PartitionTaken(PARTITION), self.now_ms)
        for past_event in self.log if log is None else log:
            router.apply(past_event, self.now_ms)
        router.apply(PartitionReady(PARTITION), self.now_ms)
        return router

    def taken_over(self) -> None:
        """Another router takes the partition over, with a fleet as it is."""
        for number in range(2):
            router = Router(ROUTER, self.settings)
            for event, at_ms in self.fleet_log:
                router.apply(event, at_ms)
            router.apply(PartitionTaken(PARTITION), self.now_ms)
            for past_event in self.log:
                router.apply(past_event, self.now_ms)
            if number:
                self.router = router
            else:
                self.twin = router
        self.apply(PartitionReady(PARTITION))

    def work_in_flight(self) -> list[Work]:
        """Work that workers which live hold, in a fixed order."""
        return [
            work
            for worker in sorted(self.workers.values(), key=lambda w: w.worker_id)
            if not worker.silent
            for _, work in sorted(worker.holds.items())
        ]

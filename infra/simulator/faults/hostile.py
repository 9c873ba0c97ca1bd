"""Hostile records, as faults drawn from a seed: repeated, forged and oversized ones.

A forged record is about work that some worker has at that time, and passes every check of form;
only its content is wrong. Nothing here forges a record that could not be told from a true one,
since writers of a topic are trusted that far (infra/docs/operate.md, "Say who may write"). So no
later epoch or heartbeat of a present worker is forged, and no order about a present request.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from infra.simulator.cluster import Cluster
from infra.simulator.members.membership import FleetRecord, heartbeat, registration
from infra.simulator.members.router import PARTITION
from infra.simulator.members.worker import SimWorker
from infra.simulator.traffic.poisson import unique_tokens
from infra.simulator.traffic.script import SimTurn, conversation
from schemas.errors import RecordError
from schemas.records import (
    Cancellation,
    CancelReason,
    Endpoint,
    Heartbeat,
    KvHandle,
    MemberState,
    Orchestration,
    Outcome,
    OutcomeKind,
    PhaseKind,
    Priority,
    Request,
    Sampling,
    WireError,
    Work,
    WorkPhase,
)
from schemas.rules.numbers import check_numbers
from schemas.rules.pairs import is_paired
from schemas.rules.phases import phase_of
from schemas.settings import LogSettings
from schemas.topics import WORK_TOPICS
from streams.core.events import (
    CancellationArrived,
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PhaseArrived,
    RequestArrived,
)
from streams.log.membership import check_leases

Draw = np.random.Generator
_LOG = LogSettings()
TOPICS = ("requests", "phases", "outcomes", "tokens", "fleet", "prefixes", *WORK_TOPICS.values())
ORDERS = "decode"  # any topic of work; all are delivered alike
LARGE_PROMPT_TOKENS = 16
_NUMBERS = (0, 1, -1, (1 << 31) - 1, -(1 << 31))
_FLOATS = (0.5, 1e9, 1e300, -1.0, float("nan"), float("inf"))


class OpenCluster(Cluster):
    """A cluster whose log others can write to."""

    buried = 0  # forged records that failed the agents' checks

    def forge(self, topic: str, record: object, event: Event) -> None:
        """Write a forged record; its reader checks it as the agents do, and drops it if a check
        fails."""
        self.bus.send((topic, PARTITION), record, lambda: self._read(record, event), forged=True)

    def _read(self, record: object, event: Event) -> None:
        try:
            check_numbers(record)
            check_leases(record, _LOG)
        except RecordError:
            self.buried += 1
        else:
            self.router.apply(event)


def large_request(cluster: Cluster, grammar_chars: int) -> None:
    """Send a request with a grammar of `grammar_chars` characters."""
    turn = SimTurn(prompt_tokens=LARGE_PROMPT_TOKENS, output_tokens=4, grammar_chars=grammar_chars)
    at_ms = cluster.clock.now_ms
    tokens = unique_tokens(int(at_ms), LARGE_PROMPT_TOKENS + 4)
    name, block_tokens = f"large-{cluster.clients.started}", cluster.setup.block_tokens
    cluster.clients.start([conversation(name, at_ms, [turn], tokens, block_tokens)])


def forge_record(cluster: Cluster, draw: Draw) -> None:
    """Write a record about a piece of work that some worker has now."""
    assert isinstance(cluster, OpenCluster)
    work_lists = [
        worker.process.requests.works for worker in cluster.workers.values() if worker.alive
    ]
    busy = [works for works in work_lists if works]
    if busy:
        works = busy[int(draw.integers(len(busy)))]
        work = works[int(draw.integers(len(works)))]
        make = _FORGERIES[int(draw.integers(len(_FORGERIES)))]
        make(cluster, work, draw)


def _foreign_phase(cluster: OpenCluster, work: Work, draw: Draw) -> None:
    """Forge a phase of another request, attempt or worker."""
    wrongs: tuple[dict[str, Any], ...] = (
        {"request_id": "nobody"},
        {"worker_id": "stranger"},
        {"worker_epoch": work.worker_epoch + 1},
        {"attempt": work.attempt - 1},
        {"attempt": work.attempt + 1},
    )
    kind = list(PhaseKind)[int(draw.integers(len(PhaseKind)))]
    error = WireError(code="forged", message="\x1b[2J" * 99) if kind is PhaseKind.FAILED else None
    kv = KvHandle(
        worker_id=work.worker_id,
        worker_epoch=work.worker_epoch,
        engine_id=work.worker_id,
        engine_request_id=work.request_id,
        tokens=int(draw.choice(_NUMBERS)),
        block_size=0,
        expires_at_ms=0,
    )
    now_ms = int(cluster.clock.now_ms)
    phase = phase_of(work, kind, now_ms, now_ms, kv=kv, error=error)
    phase = replace(phase, **wrongs[int(draw.integers(len(wrongs)))])
    cluster.forge("phases", phase, PhaseArrived(phase, PARTITION))


def _senseless_phase(cluster: OpenCluster, work: Work, draw: Draw) -> None:
    """Forge a phase of the attempt's own worker, with meaningless numbers."""
    kind = PhaseKind.KV_RECEIVED
    paired = is_paired(work.orchestration)
    if work.phase is WorkPhase.PREFILL and paired:
        kind = PhaseKind.PREFILL_DONE  # for other attempts this would be true, too early
    elif paired:
        return  # true, too early: the router would not notice the loss of the prefill worker
    phase = phase_of(
        work,
        kind,
        int(cluster.clock.now_ms),
        int(draw.choice(_NUMBERS[:2])),
        prompt_tokens=int(draw.choice(_NUMBERS)),
        cached_tokens=int(draw.choice(_NUMBERS)),
        kv_bytes=int(draw.choice(_NUMBERS)),
        transfer_ms=float(draw.choice(_FLOATS)),
    )
    cluster.forge("phases", phase, PhaseArrived(phase, PARTITION))


def _outcome(cluster: OpenCluster, work: Work, draw: Draw) -> None:
    """Forge an outcome of an earlier attempt, or of an unknown request."""
    outcome = Outcome(
        request_id=work.request_id,
        session_id=work.session_id,
        attempt=work.attempt,
        kind=OutcomeKind.COMPLETED,
        finish_reason="length",
        written_by=work.worker_id,
        mode=work.mode,
        prefill_worker=work.prefill_worker,
        decode_worker=work.worker_id,
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        kv_bytes=0,
        arrived_ms=work.arrived_ms,
        first_token_ms=0,
        ended_ms=int(cluster.clock.now_ms),
    )
    wrong = {"attempt": work.attempt - 1} if draw.random() < 0.5 else {"request_id": "nobody"}
    outcome = replace(outcome, **wrong)
    cluster.forge("outcomes", outcome, OutcomeArrived(outcome, PARTITION))


def _request(cluster: OpenCluster, work: Work, draw: Draw) -> None:
    """Forge another request under the id of an accepted one."""
    request = Request(
        request_id=work.request_id,
        parent_id="",
        session_id=work.session_id,
        endpoint=Endpoint.COMPLETION,
        priority=Priority.BATCH,
        model="none",
        prompt_tokens=b"",
        sampling=work.sampling,
        arrived_ms=int(draw.choice(_NUMBERS)),
        deadline_ms=0,
        gateway_id="stranger",
        gateway_partition=int(draw.choice(_NUMBERS[:2])),
    )
    cluster.forge("requests", request, RequestArrived(request, PARTITION))


def _cancellation(cluster: OpenCluster, work: Work, draw: Draw) -> None:
    """Forge a cancellation of an unknown request."""
    at_ms = int(draw.choice(_NUMBERS))
    cancellation = Cancellation(
        request_id="nobody",
        session_id=work.session_id,
        reason=CancelReason.CLIENT_GONE,
        at_ms=at_ms,
    )
    cluster.forge("cancellations", cancellation, CancellationArrived(cancellation, PARTITION))


def _stranger(cluster: OpenCluster, work: Work, draw: Draw) -> None:
    """Forge a worker that joins, sometimes with another worker's leases, and gets work."""
    worker = cluster.workers[work.worker_id]
    name = f"stranger-{cluster.bus.next_offset('fleet', PARTITION)}"
    real = registration(worker, (work.orchestration,))
    assert real.capability is not None
    capability, sizes = real.capability, ("block_size", "max_model_len", "running_max")
    if draw.random() < 0.5:
        odd: dict[str, Any] = {size: int(draw.choice(_NUMBERS)) for size in sizes}
        capability = replace(capability, engine_id=name, **odd)
    leases = real.leases
    if draw.random() < 0.3:
        leases = [replace(lease, partition=int(draw.choice(_NUMBERS))) for lease in leases]
    stranger = cluster.make_worker(name, worker.roles, worker.partition)
    stranger.crash()  # it never serves
    cluster.workers[name] = stranger
    joined = replace(real, member_id=name, capability=capability, leases=leases)
    _to_fleet(cluster, joined)
    if draw.random() < 0.7:
        _to_fleet(cluster, replace(_odd_beat(cluster, worker, draw), member_id=name))


def _odd_beat(cluster: Cluster, worker: SimWorker, draw: Draw) -> Heartbeat:
    beat = heartbeat(worker, 0)
    load = replace(
        beat.load,
        step_ms=float(draw.choice(_FLOATS)),
        running=int(draw.choice(_NUMBERS)),
        waiting=int(draw.choice(_NUMBERS)),
        queued_tokens=int(draw.choice(_NUMBERS)),
        kv_blocks_used=int(draw.choice(_NUMBERS)),
        requests_total=int(draw.choice(_NUMBERS)),
    )
    few = [replace(grant, credits=int(draw.choice(_NUMBERS[:3]))) for grant in beat.grants]
    return replace(beat, load=load, grants=few, at_ms=int(draw.choice(_NUMBERS)))


def _former_life(cluster: OpenCluster, work: Work, draw: Draw) -> None:
    """Forge a record of a present worker: of a former epoch, or a heartbeat with an old number."""
    worker = cluster.workers[work.worker_id]
    beat = _odd_beat(cluster, worker, draw)
    records: tuple[FleetRecord, ...] = (
        replace(beat, epoch=worker.epoch - 1, seq=1 << 62, state=MemberState.GONE),
        replace(beat, seq=int(draw.choice((0, -1)))),
        replace(registration(worker, ()), epoch=worker.epoch - 1, leases=[], roles=[]),
        replace(beat, member_id="nobody", seq=1),
    )
    _to_fleet(cluster, records[int(draw.integers(len(records)))])


def _to_fleet(cluster: OpenCluster, record: FleetRecord) -> None:
    offset = cluster.bus.next_offset("fleet", PARTITION)
    cluster.forge("fleet", record, FleetRecordArrived(record, offset))


def _order(cluster: OpenCluster, work: Work, draw: Draw) -> None:
    """Forge work: of an unknown request, for another epoch or worker, or a repetition."""
    now_ms = int(cluster.clock.now_ms)
    name = f"nobody-{cluster.bus.next_offset(ORDERS, 0)}"
    order = replace(
        work,
        request_id=name,
        prompt_tokens=unique_tokens(now_ms, LARGE_PROMPT_TOKENS).tobytes(),
        sampling=Sampling(max_tokens=4, ignore_eos=True),
        attempt=int(draw.choice(_NUMBERS)),
        orchestration=Orchestration.PREFILL_FIRST,
        kv=None,
        kv_target=None,
        deadline_ms=now_ms + int(draw.choice((2, 50, 1_000))),
    )
    orders = (
        order,
        work,
        replace(order, worker_epoch=work.worker_epoch + 1),
        replace(work, worker_epoch=work.worker_epoch - 1, attempt=work.attempt + 1),
        replace(work, worker_id="stranger", attempt=work.attempt + 1),
    )
    cluster.order((ORDERS, 0), orders[int(draw.integers(len(orders)))], forged=True)


_FORGERIES = (
    *(_foreign_phase, _senseless_phase, _outcome, _request, _cancellation),
    *(_stranger, _former_life, _order),
)

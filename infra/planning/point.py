"""Simulates one point of the grid and measures it.

`later` figures are of turns after the first. A turn that failed, or that was never sent because an
earlier one failed, counts as failed. `cost_` figures count it with the timeout as its TTFT, and the
timeout over its tokens as its TPOT; the other figures are of completed requests only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.planning import authors_serving
from infra.planning.grid import CONVERSATIONS_MAX, DURATION_MS, TIMEOUT_MS, Config, Workload
from infra.simulator.cluster import ORCHESTRATIONS, READY_MS, Checker, Cluster, SimFault
from infra.simulator.hash_placer import HashPlacer
from infra.simulator.machine.latency import H100, Setup
from infra.simulator.members.clients import ClientRequest
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import poisson
from infra.simulator.traffic.script import SimConversation
from schemas.records import DecisionKind, Mode
from streams.config import RouterSettings
from streams.core.effects import Decide, Effect
from streams.core.events import Event
from streams.core.placement.ppd_table import PpdTable
from workers.llm.vllm.settings import VllmSettings

TICK_MS = 250  # coarse is enough: events place requests, ticks only expire them
_GAP_MS = 3_000.0  # between two loads of a series
ORDERS = VllmSettings().orchestrations  # the default of the real engine
SETUP = Setup(gpu=replace(H100, memory_share=authors_serving.GPU_MEMORY_SHARE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A configuration under one workload, at one load or at several loads in a row."""

    config: Config
    workload: Workload
    loads_per_s: tuple[float, ...]
    seed: int
    table: PpdTable | None = None
    weights: tuple[float, float] = (-1.0, -1.0)
    setup: Setup = SETUP
    conversations_max: int = CONVERSATIONS_MAX
    published: bool = True  # whether plain runs have the authors' proxy and connector
    connector_ms: float = authors_serving.CONNECTOR_MS  # of theirs, per prompt

    def arrivals(
        self, load_per_s: float, *, begin_ms: float, duration_ms: float, name: str
    ) -> list[SimConversation]:
        """Draw the conversations of the workload that begin within `duration_ms`."""
        return poisson(
            self.workload.profile,
            per_s=load_per_s,
            duration_ms=duration_ms,
            begin_ms=begin_ms,
            block_tokens=self.setup.block_tokens,
            seed=[self.seed],
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The figures of one configuration under one workload at one load. Times in ms."""

    config: Config
    workload: str
    load_per_s: float
    requests: int
    failed: int
    later: int  # completed turns after the first
    ttft: float = 0.0  # means of later turns
    ttft_p50: float = 0.0
    ttft_p99: float = 0.0
    decode_ttft: float = 0.0  # mean, of the decode worker's first token
    decode_ttft_p99: float = 0.0
    first_ttft: float = 0.0  # mean of first turns
    first_decode_ttft: float = 0.0
    latency: float = 0.0  # mean of whole answers, of all turns
    tpot: float = 0.0  # of all turns
    tpot_p99: float = 0.0
    decode_tpot: float = 0.0  # mean of later turns, from the decode worker's first token on
    every_decode_tpot: float = 0.0  # likewise of all turns
    cost_ttft: float = 0.0
    cost_tpot: float = 0.0
    kv_bytes: int = 0  # moved between workers
    later_kv_bytes: int = 0  # KV bytes of later turns
    local: int = 0  # later turns that were placed locally
    load_seen: float = 0.0  # mean load that the router saw at placements of later turns
    tokens_per_s: float = 0.0  # of completed answers, from the first arrival time to the last end
    longest_ms: float = 0.0  # the completed request that took longest
    memory_share: float = 0.0  # most KV that requests held of a worker's memory
    buffered_bytes: int = 0  # most KV in a connector's buffer
    crashed: int = 0  # workers whose buffer overflowed

    @property
    def failure_rate(self) -> float:
        return self.failed / self.requests


class LoadRecorder(Checker):
    """A checker that only records the router's load at each placement."""

    def __init__(self) -> None:
        self.loads: dict[str, float] = {}

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        """Record the router's load for each placement among the effects."""
        for effect in effects:
            if isinstance(effect, Decide) and effect.decision.kind is DecisionKind.PLACE:
                self.loads[effect.decision.request_id] = effect.decision.load


def run(spec: Spec) -> list[Point]:
    """Simulate each load of a spec; a series runs on one cluster with the same router."""
    recorder = LoadRecorder()
    cluster = make_cluster(spec, recorder)
    begin_ms, points = READY_MS, []
    for load in spec.loads_per_s:
        conversations = spec.arrivals(
            load, begin_ms=begin_ms, duration_ms=DURATION_MS, name=f"{load:g}"
        )
        before = len(cluster.clients.requests)
        cluster.run(conversations)
        moved_bytes = cluster.links.moved_bytes
        requests = cluster.clients.requests[before:]
        figures = measure(spec, load, conversations, requests, moved_bytes, begin_ms)
        router_loads = [
            recorder.loads.get(request.request_id, 0.0) for request in requests if request.turn > 1
        ]
        load_seen = float(np.mean(router_loads or [0.0]))
        points.append(replace(figures, load_seen=load_seen, **pressure(cluster)))
        begin_ms = cluster.clock.now_ms + _GAP_MS
    cluster.finish()
    return points


def serve(
    spec: Spec, conversations: Sequence[SimConversation], faults: Sequence[SimFault] = ()
) -> Cluster:
    """Serve the conversations to their ends, and return the cluster."""
    cluster = make_cluster(spec, faults=faults)
    cluster.run(conversations)
    cluster.finish()
    return cluster


def make_cluster(spec: Spec, *checkers: Checker, faults: Sequence[SimFault] = ()) -> Cluster:
    """Return the cluster of a spec; nothing has been sent yet."""
    config = spec.config
    is_published = config.plain and spec.published
    setup = replace(spec.setup, receiver_keeps=not config.plain)
    if is_published:
        setup = authors_serving.setup_of(setup, spec.connector_ms)
    settings = RouterSettings(
        policy=config.policy,
        local_share=_share(config.share),
        **_thresholds(config),
        table="given" if spec.table is not None else "",
        orchestration="prefill_first" if config.plain else "auto",
        lends_after_ms=0,  # compared pools must not lend roles
        tick_ms=TICK_MS,
    )
    return Cluster(
        ClusterShape.parse(config.pools),
        setup,
        settings,
        timeout_ms=TIMEOUT_MS,
        conversations_max=spec.conversations_max,
        weights=spec.weights,
        table=spec.table,
        placer=HashPlacer(settings, _salt(spec), spec.table) if is_published else None,
        orchestrations=ORCHESTRATIONS if config.all_orders else ORDERS,
        checkers=[OneOutcome(), *checkers],
        faults=faults,
    )


def _thresholds(config: Config) -> dict[str, Any]:
    if config.thresholds is None:
        return {}
    tokens, queue = config.thresholds
    return {"max_local_prefill_tokens": tokens, "max_prefill_queue": queue}


def _salt(spec: Spec) -> str:
    return f"{spec.config.name} {spec.workload.name} {spec.loads_per_s} {spec.seed}"


def pressure(cluster: Cluster) -> dict[str, Any]:
    """Return the peak use of workers' memory and connectors' buffers, and the dead workers."""
    workers = cluster.workers.values()
    engines = [worker.process.engine.state for worker in workers]
    return {
        "memory_share": max(engine.blocks_max / engine.cache.blocks_max for engine in engines),
        "buffered_bytes": max(engine.buffered_bytes_max for engine in engines),
        "crashed": sum(not worker.alive for worker in workers),
    }


def _share(name: str) -> float:
    over, _, under = name.partition("/")
    return float(over or 0) / float(under or 1)


def measure(
    spec: Spec,
    load: float,
    conversations: Sequence[SimConversation],
    requests: Sequence[ClientRequest],
    moved_bytes: dict[str, int],
    begin_ms: float,
) -> Point:
    """Return the figures of one load; `moved_bytes` has the KV bytes of each request."""
    turn_count = sum(len(conversation.turns) for conversation in conversations)
    answers = [request for request in requests if request.completed]
    first = [answer for answer in answers if answer.turn == 1]
    later = [answer for answer in answers if answer.turn > 1]
    costs_ttft, costs_tpot = costs(conversations, answers)
    point = Point(
        config=spec.config,
        workload=spec.workload.name,
        load_per_s=load,
        requests=turn_count,
        failed=turn_count - len(answers),
        later=len(later),
        cost_ttft=float(np.mean(costs_ttft[:, 1:])),
        cost_tpot=float(np.mean(costs_tpot)),
        kv_bytes=sum(moved_bytes.get(request.request_id, 0) for request in requests),
        later_kv_bytes=sum(
            moved_bytes.get(request.request_id, 0) for request in requests if request.turn > 1
        ),
        local=sum(answer.mode is Mode.LOCAL for answer in later),
    )
    if not later:
        return point
    ttft = [answer.ttft_ms for answer in later]
    decode_ttft = [answer.decode_ttft_ms for answer in later]
    tpot = [answer.tpot_ms for answer in answers]
    return replace(
        point,
        ttft=float(np.mean(ttft)),
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p99=float(np.percentile(ttft, 99)),
        decode_ttft=float(np.mean(decode_ttft)),
        decode_ttft_p99=float(np.percentile(decode_ttft, 99)),
        first_ttft=float(np.mean([answer.ttft_ms for answer in first])),
        first_decode_ttft=float(np.mean([answer.decode_ttft_ms for answer in first])),
        latency=float(np.mean([answer.took_ms for answer in answers])),
        tpot=float(np.mean(tpot)),
        tpot_p99=float(np.percentile(tpot, 99)),
        decode_tpot=float(np.mean([_decode_tpot(answer) for answer in later])),
        every_decode_tpot=float(np.mean([_decode_tpot(answer) for answer in answers])),
        longest_ms=max(answer.took_ms for answer in answers),
        tokens_per_s=_tokens_per_s(answers, begin_ms),
    )


def _tokens_per_s(answers: Sequence[ClientRequest], begin_ms: float) -> float:
    """Return completion tokens of both turns over the time of the whole point, as in the paper."""
    end_ms = max(answer.sent_ms + answer.took_ms for answer in answers)
    return 1e3 * sum(answer.output_tokens for answer in answers) / (end_ms - begin_ms)


def _decode_tpot(answer: ClientRequest) -> float:
    assert answer.decode_first_ms is not None and answer.ended_ms is not None
    return (answer.ended_ms - answer.decode_first_ms) / max(1, answer.output_tokens - 1)


def costs(
    conversations: Sequence[SimConversation], answers: Sequence[ClientRequest]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return TTFT and TPOT, with the timeout for failed turns: (conversations, turns), ms."""
    completed = {(answer.session_id, answer.turn): answer for answer in answers}
    ttft, tpot = [], []
    for conversation in conversations:
        for number, turn in enumerate(conversation.turns, 1):
            answer = completed.get((conversation.session_id, number))
            ttft.append(TIMEOUT_MS if answer is None else answer.ttft_ms)
            late_ms = TIMEOUT_MS / turn.output_tokens
            tpot.append(late_ms if answer is None else answer.tpot_ms)
    shape = len(conversations), -1  # all have the same number of turns
    return np.reshape(np.array(ttft, float), shape), np.reshape(np.array(tpot), shape)

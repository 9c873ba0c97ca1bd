"""One placement under load: a simulated cluster with searches for prompts and during answers.

Router, workers' rules and gateways are the real ones (`infra/simulator`), and so is the search
scheduler (`search_gpu.py`). The router sends a prompt's search, as in Trivium; in (a) and (b) the
copies beside prefill workers answer it, in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np

from infra.planning.hardware import SearchCosts, experts, parallel
from infra.planning.point import ORDERS, TICK_MS
from infra.planning.pools import TrafficModel
from infra.research.trinity.placements import (
    LOCAL_MS,
    PlacementKind,
    PlacementLayout,
    crossing,
    index_bytes,
    lay_out,
)
from infra.research.trinity.probing import ProbeFigures, ProbingGpu
from infra.research.trinity.search_gpu import OnEnd, SearchGpu
from infra.simulator.cluster import READY_MS, Cluster
from infra.simulator.machine.gpu import SimGpu
from infra.simulator.machine.latency import Setup
from infra.simulator.members.clients import ClientRequest
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic import poisson
from infra.simulator.traffic.poisson import Profile
from schemas.records import Passage, Request, Retrieval, Retrieved
from schemas.rules.tokens import pack_tokens
from streams.config import RouterSettings
from streams.core.effects import StartRetrieval
from workers.retrieval.settings import RetrievalSettings
from workers.vector.engine.scheduler import Drop
from workers.vector.index.kinds import SearchKind as SearchKind

_WORD = 1 << 29  # token id of passages, which no conversation has


@dataclass(frozen=True, slots=True, kw_only=True)
class TrinityCase:
    """One placement with its traffic, hardware and targets."""

    kind: PlacementKind
    traffic: TrafficModel
    setup: Setup
    search: SearchCosts = SearchCosts()
    gpus: int = 16
    degree: int = 1  # GPUs of an LLM worker
    spread: str = "tensor"  # parallelism over these GPUs: tensor, experts
    displaced: float | None = None  # share of experts in (a), (b); None: by the copy's GPUs
    hop_ms: float = 3.0  # over the log, one way; measured: 3.0 to 4.1 ms round trip
    search_by_ms: float = 250.0  # after which a prompt continues without its search
    ttft_ms: float = 300.0  # targets
    tpot_ms: float = 20.0
    duration_ms: float = 5_000.0
    seed: int = 1

    def layout(self) -> PlacementLayout:
        """Return the layout of the GPUs; raises ConfigError if they are too few."""
        return lay_out(
            self.kind,
            self.gpus,
            self.degree,
            self.worker,
            self.search,
            self.traffic,
            self.tpot_ms,
        )

    @property
    def worker(self) -> Setup:
        """Return the setup of an LLM worker: with a copy beside it, in its memory, or without
        one."""
        crossing_gpus = crossing(self.kind, self.degree, self.search.shards)
        if self.spread == "experts":
            displaced = crossing_gpus / self.degree if self.displaced is None else self.displaced
            has_copy = self.kind.beside != "none" and not self.kind.in_place
            setup = experts(self.setup, self.degree, displaced if has_copy else 0.0)
        else:
            setup = parallel(self.setup, self.degree, crossing_gpus)
        if self.kind.in_place:
            copy_bytes = self.search.index.total_bytes / setup.gpu.memory_share
            gpu = replace(setup.gpu, memory_bytes=setup.gpu.memory_bytes - copy_bytes)
            setup = replace(setup, gpu=gpu)
        return setup


@dataclass(frozen=True, slots=True, kw_only=True)
class TrinityResult:
    """Figures of one case; times in ms."""

    placement: str
    per_s: float
    llm_workers: int
    prefill: int
    decode: int
    copies: int
    search_gpus: int
    index_gb: float
    updates_per_s: float  # of all copies together
    requests: int
    failed: int
    without: int  # prompts that continued without their search's result
    ttft_p50: float = 0.0
    ttft_p99: float = 0.0
    tpot_p50: float = 0.0
    tpot_p99: float = 0.0
    tokens_per_s: float = 0.0
    probe_p50: float = 0.0
    probe_p99: float = 0.0
    stalled_share: float = 0.0
    search_busy: float = 0.0
    good_share: float = 0.0  # of requests within the case's targets


class RagCluster(Cluster):
    """A simulated cluster of one layout, with its copies of the index."""

    def __init__(self, case: TrinityCase, layout: PlacementLayout) -> None:
        self.case, self.layout = case, layout
        self.figures = ProbeFigures()
        self.without = 0
        self._search_numbers = count()
        self._probed: dict[str, int] = {}
        super().__init__(
            ClusterShape(prefill=layout.prefill, decode=layout.decode),
            case.worker,
            RouterSettings(tick_ms=TICK_MS),
            orchestrations=ORDERS,
            checkers=[OneOutcome()],
        )
        busy = self._in_place_share() if layout.kind.in_place else 0.0
        for worker in self.workers.values():
            worker.process.engine.gpu.slow = 1 / (1 - busy)
        slow = 2.0 if layout.kind.in_place else 1.0  # search kernels and the LLM's take turns
        self.copies = [self._search_gpu(slow) for _ in range(layout.copies)]

    def _in_place_share(self) -> float:
        """Return the share of a worker's memory bandwidth that its own copy takes."""
        traffic, search = self.case.traffic, self.case.search
        rate = traffic.searches_per_s / self.layout.copies + traffic.updates_per_s
        return min(0.9, rate / (search.searches_per_s * self.case.degree))

    def _search_gpu(self, slow: float) -> SearchGpu:
        case = self.case
        gpu = SearchGpu(self.clock, case.search, RetrievalSettings(), slow=slow)
        updates_per_s = case.traffic.updates_per_s / case.search.shards
        if updates_per_s:
            self._update(gpu, 1e3 / updates_per_s)
        return gpu

    def _update(self, copy: SearchGpu, every_ms: float) -> None:
        """Link a changed document into a copy, as a search of the lowest class; repeat."""
        copy.search(SearchKind.LINK, _ignored)
        self.clock.after(every_ms, lambda: self._update(copy, every_ms))

    def gpu_of(self, worker_id: str) -> Callable[..., SimGpu]:
        """Return the worker's GPU class; workers that decode get one that probes."""
        probing = self.case.traffic.probing
        if not probing.every or worker_id.startswith("prefill"):
            return SimGpu
        return partial(
            ProbingGpu, name=worker_id, probing=probing, ask=self._probe, figures=self.figures
        )

    # Searches

    def _copy(self, worker: int | None) -> tuple[SearchGpu, float]:
        """Return the copy that answers, and the delay to it.

        `worker` is the number of a decode worker, or None for a prompt's search.
        """
        layout, turn = self.layout, next(self._search_numbers)
        beside = layout.kind.beside
        if beside == "all" and worker is not None:
            at = (layout.prefill + worker) * layout.coupled // (layout.prefill + layout.decode)
            return self.copies[at], LOCAL_MS
        if beside == "all":
            near = max(1, layout.prefill * layout.coupled // (layout.prefill + layout.decode))
            return self.copies[turn % near], LOCAL_MS
        if beside == "prefill" and worker is None:
            return self.copies[turn % layout.coupled], LOCAL_MS
        return self.copies[layout.coupled + turn % layout.pooled], self.case.hop_ms

    def _search(self, kind: SearchKind, worker: int | None, on_end: OnEnd, by_ms: float) -> None:
        copy, hop_ms = self._copy(worker)

        def reply(why: Drop | None) -> None:
            self.clock.after(hop_ms, lambda: on_end(why))

        self.clock.after(hop_ms, lambda: copy.search(kind, reply, by_ms))

    def _probe(self, worker_id: str, deliver: Callable[[], None]) -> None:
        by_ms = self.clock.now_ms + 1e6
        number = int(worker_id.rpartition("-")[2])
        self._search(SearchKind.DECODE, number, lambda why: deliver(), by_ms)

    def _ask(self, ask: StartRetrieval) -> None:
        retrieval = ask.request.retrieval
        assert retrieval is not None

        def on_end(why: Drop | None) -> None:
            self.without += why is not None
            self._report(_make_retrieved(ask, self.clock.now_ms, retrieval.tokens_max, why))

        self._search(SearchKind.PREFILL, None, on_end, retrieval.by_ms)

    def _request(self, request: Request) -> None:
        traffic = self.case.traffic
        turn = int(request.request_id.split("-")[1])
        if int((turn + 1) * traffic.searched) > int(turn * traffic.searched):
            request = replace(request, retrieval=self._wish(request))
        super()._request(request)

    def _wish(self, request: Request) -> Retrieval:
        tokens = int(self.case.traffic.found_tokens)
        return Retrieval(
            collection="documents",
            query=request.session_id,
            k=1,
            by_ms=int(self.clock.now_ms + self.case.search_by_ms),
            tokens_max=tokens,
            at=2,
            tail_at=len(request.prompt_tokens) // 4,
            room_tokens=tokens,
        )


def _ignored(why: Drop | None) -> None:
    pass


def _make_retrieved(ask: StartRetrieval, now_ms: float, tokens: int, why: Drop | None) -> Retrieved:
    passage = Passage(
        passage_id="d#0", document_id="d", tokens=pack_tokens([_WORD] * tokens), score=1.0
    )
    return Retrieved(
        request_id=ask.request.request_id,
        session_id=ask.request.session_id,
        router_id="router-0",
        passages=() if why else (passage,),
        shards=1,
        asked_ms=int(now_ms),
        at_ms=int(now_ms),
        history=ask.history,
    )


def run(case: TrinityCase) -> TrinityResult:
    """Serve the requests that arrive within the case's duration, to their ends."""
    layout = case.layout()
    cluster = RagCluster(case, layout)
    traffic = case.traffic
    shape = poisson.TurnShape(
        input_tokens=round(traffic.prompt_tokens), output_tokens=round(traffic.answer_tokens)
    )
    conversations = poisson.poisson(
        Profile(first=shape, later=shape, turns=1),
        per_s=traffic.per_s,
        duration_ms=case.duration_ms,
        begin_ms=READY_MS,
        block_tokens=case.setup.block_tokens,
        seed=[case.seed],
        name="t",
    )
    cluster.run(conversations)
    cluster.finish()
    return _result(cluster, cluster.clients.requests)


def _result(cluster: RagCluster, requests: Sequence[ClientRequest]) -> TrinityResult:
    case, layout, figures = cluster.case, cluster.layout, cluster.figures
    answers = [request for request in requests if request.completed]
    passed_ms = cluster.clock.now_ms - READY_MS
    ttft, tpot = [answer.ttft_ms for answer in answers], [answer.tpot_ms for answer in answers]
    end_ms = max((answer.sent_ms + answer.took_ms for answer in answers), default=READY_MS)
    tokens = sum(answer.output_tokens for answer in answers)
    return TrinityResult(
        placement=case.kind.name,
        per_s=case.traffic.per_s,
        llm_workers=layout.prefill + layout.decode,
        prefill=layout.prefill,
        decode=layout.decode,
        copies=layout.copies,
        search_gpus=0 if layout.kind.in_place else layout.copies * case.search.shards,
        index_gb=index_bytes(layout, case.search) / 1e9,
        updates_per_s=layout.copies * case.traffic.updates_per_s,
        requests=len(requests),
        failed=len(requests) - len(answers),
        without=cluster.without,
        ttft_p50=_percentile(ttft, 50),
        ttft_p99=_percentile(ttft, 99),
        tpot_p50=_percentile(tpot, 50),
        tpot_p99=_percentile(tpot, 99),
        tokens_per_s=1e3 * tokens / (end_ms - READY_MS) if answers else 0.0,
        probe_p50=_percentile(figures.latencies_ms, 50),
        probe_p99=_percentile(figures.latencies_ms, 99),
        stalled_share=figures.stalled_share,
        good_share=_within_targets(case, answers) / max(1, len(requests)),
        search_busy=sum(copy.busy_ms for copy in cluster.copies) / passed_ms / layout.copies,
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def _within_targets(case: TrinityCase, answers: Sequence[ClientRequest]) -> int:
    return sum(
        answer.ttft_ms <= case.ttft_ms and answer.tpot_ms <= case.tpot_ms for answer in answers
    )

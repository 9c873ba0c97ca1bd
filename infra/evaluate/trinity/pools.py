"""How many workers each pool wants for a traffic, and why: `trivium plan pools`.

Theory of operation. The times of a step are those of the latency model. A prefill worker computes
prompts one after the other; of n of them at utilisation u a prompt waits about u / (2 n (1 - u)) of
its own time (M/D/n, roughly). Answers in decode, by Little's law, are as many as arrive during
one: that is solved for the batch of each worker, and the batch gives the time per token. Searches
wait for little as long as the GPU is not full: at most `BUSY_MAX` of its rate are planned for. The
smallest pool that meets the targets is what is wanted.
"""

import math
from dataclasses import dataclass, replace

from infra.evaluate.trinity.hardware import SearchCosts
from infra.evaluate.trinity.probing import ProbeSettings
from infra.scaling.queueing import BUSY_MAX, waits_ms
from infra.simulator.machine.latency import Setup, StepCosts
from schemas.errors import ConfigError

WORKERS_MAX = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficModel:
    """What is asked of a cluster; means of all requests, at the rate of the busiest time."""

    per_s: float
    prompt_tokens: float
    answer_tokens: float
    searched: float = 1.0  # share of requests that search first
    found_tokens: float = 1_024  # that such a search puts in
    probing: ProbeSettings = ProbeSettings()
    updates_per_s: float = 0.0  # documents that change, at each copy of the index

    def __post_init__(self) -> None:
        for name in ("per_s", "prompt_tokens", "answer_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"traffic.{name}: expected more than 0, found {getattr(self, name):g}"
                )

    @property
    def computed_tokens(self) -> float:
        """Tokens of a prompt, with the passages found for it."""
        return self.prompt_tokens + self.searched * self.found_tokens

    @property
    def probes(self) -> float:
        """Mean number of probes of one answer."""
        every = self.probing.every
        return max(0.0, math.ceil(self.answer_tokens / every) - 1) if every else 0.0

    @property
    def context_tokens(self) -> float:
        """Tokens that a step reads of a sequence, on average."""
        inserted_tokens = self.probes * self.probing.new_share * self.probing.new_tokens
        return self.computed_tokens + (self.answer_tokens + inserted_tokens) / 2

    @property
    def searches_per_s(self) -> float:
        return self.per_s * (self.searched + self.probes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What users are to see."""

    ttft_ms: float = 500.0
    tpot_ms: float = 25.0
    hop_ms: float = 3.0  # over the log, one way
    steady_ms: float = 10.0  # of a time to first token, besides search, queue and prompt: hops


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One pool: how many workers, how busy they are, and what decided it."""

    name: str
    workers: int
    gpus: int
    utilisation: float
    figure_ms: float  # TTFT of prefill, time per token of decode, time of a search
    why: str


def plan(
    setup: Setup, search: SearchCosts, traffic: TrafficModel, targets: Targets, gpus_each: int = 1
) -> list[PoolPlan]:
    """The pools prefill, decode and retrieval; raises ConfigError where no number would do."""
    retrieval_pool = retrieval(search, traffic)
    searching_ms = (retrieval_pool.figure_ms + 2 * targets.hop_ms) * (traffic.searched > 0)
    return [
        prefill(setup, traffic, targets, searching_ms, gpus_each),
        decode(setup, traffic, targets, gpus_each),
        retrieval_pool,
    ]


def prompt_ms(setup: Setup, tokens: float) -> float:
    """Return how long a prompt takes alone on a prefill worker."""
    costs = StepCosts(setup)
    steps = math.ceil(tokens / setup.prefill_chunk_tokens)
    computing_ms = max(costs.weights_ms * steps, costs.token_ms * tokens)
    exchange_ms = costs.exchange_ms * tokens
    return computing_ms + exchange_ms + costs.overhead_ms * steps + costs.pair_ms * tokens**2 / 2


def prefill(
    setup: Setup, traffic: TrafficModel, targets: Targets, searching_ms: float, gpus_each: int
) -> PoolPlan:
    """The least workers whose queue leaves the target for the first token standing."""
    alone_ms = prompt_ms(setup, traffic.computed_tokens)
    fixed_ms = searching_ms + targets.steady_ms + alone_ms
    if fixed_ms >= targets.ttft_ms:
        raise ConfigError(
            f"no number of prefill workers gives a first token in {targets.ttft_ms:g} ms: an idle "
            f"one takes {fixed_ms:.0f} ms; raise --ttft, or take a quicker GPU (--gpu, --tp)"
        )
    offered = traffic.per_s * alone_ms / 1e3
    for workers in range(1, WORKERS_MAX):
        busy = offered / workers
        if busy > BUSY_MAX:
            continue
        queue_ms = waits_ms(alone_ms, busy, workers)
        if fixed_ms + queue_ms <= targets.ttft_ms:
            break
    reason = "its compute" if workers == math.ceil(offered / BUSY_MAX) else "its queue"
    why = (
        f"{offered:.2f} GPUs' time of prompts ({alone_ms:.1f} ms each); {reason} decides: with "
        f"{workers} a prompt waits {queue_ms:.1f} ms"
    )
    return _pool("prefill", workers, gpus_each, busy, fixed_ms + queue_ms, why)


def tpot_ms(setup: Setup, traffic: TrafficModel, batch: float) -> float:
    """Return the time per token in a batch; probes' tokens are computed beside it."""
    costs, probing = StepCosts(setup), traffic.probing
    a_token = traffic.probes / traffic.answer_tokens * probing.new_share * probing.new_tokens
    appended = batch * a_token
    step_ms = costs.fixed_ms(math.ceil(batch + appended))
    context = batch * traffic.context_tokens
    return step_ms + costs.kv_ms * context + costs.pair_ms * appended * traffic.context_tokens


def batch_of(setup: Setup, traffic: TrafficModel, workers: float) -> float | None:
    """Sequences on each decode worker, by Little's law; None where it never catches up."""
    batch = 1.0
    for _ in range(200):
        took_s = traffic.answer_tokens * tpot_ms(setup, traffic, batch) / 1e3
        next_batch = traffic.per_s / workers * took_s
        if next_batch > 16 * setup.running_max:
            return None
        if abs(next_batch - batch) < 1e-3 * batch:
            break
        batch = next_batch
    return batch


def decode(setup: Setup, traffic: TrafficModel, targets: Targets, gpus_each: int) -> PoolPlan:
    """The least workers that keep the pace, with room for all answers under way."""
    least_ms = tpot_ms(setup, traffic, 1)
    if least_ms > targets.tpot_ms:
        raise ConfigError(
            f"no number of decode workers gives a token in {targets.tpot_ms:g} ms: a lone answer "
            f"takes {least_ms:.1f} ms; raise --tpot, or take a quicker GPU (--gpu, --tp)"
        )
    batch_limit, bound = answer_slots(setup, traffic)
    for workers in range(1, WORKERS_MAX):
        batch = batch_of(setup, traffic, workers)
        if batch is None or batch > BUSY_MAX * batch_limit:
            continue
        pace_ms = tpot_ms(setup, traffic, batch)
        if pace_ms <= targets.tpot_ms:
            break
    else:
        raise ConfigError(f"more than {WORKERS_MAX} decode workers would be wanted; lower --rps")
    before = batch_of(setup, traffic, workers - 1) if workers > 1 else batch
    slow = before is None or tpot_ms(setup, traffic, before) > targets.tpot_ms
    reason = "one alone has room" if workers == 1 else "the pace decides" if slow else bound
    why = f"{batch:.0f} answers under way on each, of {batch_limit:.0f}; {reason}"
    return _pool("decode", workers, gpus_each, batch / batch_limit, pace_ms, why)


def answer_slots(setup: Setup, traffic: TrafficModel) -> tuple[float, str]:
    """Answers that a decode worker can hold at once, and what bounds them."""
    tokens = traffic.context_tokens + traffic.answer_tokens / 2
    by_memory = setup.kv_blocks * setup.block_tokens / tokens
    if by_memory < 1:
        raise ConfigError(
            f"no answer fits: {setup.model.name} leaves {setup.gpu.name} room for "
            f"{max(0, setup.kv_blocks) * setup.block_tokens} tokens; take more GPUs for each "
            "worker (--tp)"
        )
    if by_memory < setup.running_max:
        return by_memory, "KV memory decides"
    return setup.running_max, "the most sequences of a batch decide"


def retrieval(search: SearchCosts, traffic: TrafficModel) -> PoolPlan:
    """The least copies of the index that keep up; each takes as many GPUs as it has shards."""
    rate = traffic.searches_per_s
    copies = 1
    while (offered := rate / copies + traffic.updates_per_s) > BUSY_MAX * search.searches_per_s:
        if traffic.updates_per_s >= BUSY_MAX * search.searches_per_s or copies >= WORKERS_MAX:
            raise ConfigError(
                f"no number of copies keeps up with {traffic.updates_per_s:g} updates/s: each has "
                f"all of them, and does {search.searches_per_s:.0f} searches/s; lower --updates"
            )
        copies += 1
    busy = offered / search.searches_per_s
    slots = max(1, round(busy * 256))
    took_ms = search.index.extends * search.extend_ms(slots)
    why = (
        f"{rate:.0f} searches/s of {search.searches_per_s:.0f} that a copy does; the index is "
        f"{search.index.total_bytes / 1e9:.1f} GB, {search.shards} "
        f"{'shard' if search.shards == 1 else 'shards'} a copy"
    )
    return PoolPlan(
        name="retrieval", workers=copies, gpus=copies * search.shards, utilisation=busy,
        figure_ms=took_ms, why=why,
    )  # fmt: skip


def _pool(
    name: str, workers: int, gpus_each: int, busy: float, figure_ms: float, why: str
) -> PoolPlan:
    return PoolPlan(
        name=name, workers=workers, gpus=workers * gpus_each, utilisation=busy,
        figure_ms=figure_ms, why=why,
    )  # fmt: skip


def decode_per_s(setup: Setup, traffic: TrafficModel, tpot_max_ms: float) -> float:
    """Requests/s that one decode worker takes at most, with its pace and its room kept."""
    batch_limit = BUSY_MAX * answer_slots(setup, traffic)[0]

    def keeps_up(per_s: float) -> bool:
        batch = batch_of(setup, replace(traffic, per_s=per_s), 1)
        return (
            batch is not None
            and batch <= batch_limit
            and tpot_ms(setup, traffic, batch) <= max(tpot_max_ms, tpot_ms(setup, traffic, 1))
        )

    low, high = 0.0, 1e4
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low


def split(
    setup: Setup, traffic: TrafficModel, workers: int, tpot_max_ms: float
) -> tuple[int, float]:
    """How many of the workers prefill where most requests/s are served, and how many these are."""
    prompts = 1e3 / prompt_ms(setup, traffic.computed_tokens)
    answers = decode_per_s(setup, traffic, tpot_max_ms)
    rates = {n: min(n * prompts, (workers - n) * answers) for n in range(1, workers)}
    best = max(rates, key=lambda n: (rates[n], n))
    return best, rates[best]

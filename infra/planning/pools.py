"""How many workers each pool needs for a traffic, and why: `trivium plan pools`.

Theory of operation. The times of a step are those of the latency model. A prefill worker computes
prompts one after the other; with n workers at utilisation u a prompt waits about u / (2 n (1 - u))
of its own time (M/D/n, roughly). By Little's law, the answers in decode are those that arrive
during one; this is solved for the batch of each worker, and the batch gives the time per token.
Searches wait little as long as the GPU is not full: at most `BUSY_MAX` of its rate is planned for.
The plan is the smallest pool that meets the targets.
"""

import math
from dataclasses import dataclass, replace

from infra.planning.hardware import SearchCosts
from infra.scaling.queueing import BUSY_MAX, waits_ms
from infra.simulator.machine.latency import Setup, StepCosts
from schemas.errors import ConfigError

WORKERS_MAX = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """The probes of an answer. The share `new_share` of them has a new result (assumed)."""

    every: int = 32  # tokens; 0: no probes
    lookahead: int = 8
    stall_ms: float = 50.0
    new_tokens: int = 128
    new_share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficModel:
    """The traffic of a cluster: means over all requests, at the rate of the busiest time."""

    per_s: float
    prompt_tokens: float
    answer_tokens: float
    searched: float = 1.0  # share of requests that search first
    found_tokens: float = 1_024  # tokens that such a search inserts
    probing: ProbeSettings = ProbeSettings()
    updates_per_s: float = 0.0  # changed documents, applied to each copy of the index

    def __post_init__(self) -> None:
        for name in ("per_s", "prompt_tokens", "answer_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"traffic.{name}: expected more than 0, found {getattr(self, name):g}"
                )

    @property
    def computed_tokens(self) -> float:
        """Return the tokens of a prompt, with the passages found for it."""
        return self.prompt_tokens + self.searched * self.found_tokens

    @property
    def probes(self) -> float:
        """Return the mean number of probes of one answer."""
        every = self.probing.every
        return max(0.0, math.ceil(self.answer_tokens / every) - 1) if every else 0.0

    @property
    def context_tokens(self) -> float:
        """Return the mean tokens of context that a step reads of a sequence."""
        inserted_tokens = self.probes * self.probing.new_share * self.probing.new_tokens
        return self.computed_tokens + (self.answer_tokens + inserted_tokens) / 2

    @property
    def searches_per_s(self) -> float:
        return self.per_s * (self.searched + self.probes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The latency targets for users, and fixed delays."""

    ttft_ms: float = 500.0
    tpot_ms: float = 25.0
    hop_ms: float = 3.0  # over the log, one way
    steady_ms: float = 10.0  # hops of a first token, besides search, queue and prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One pool: how many workers, how busy they are, and the reason."""

    name: str
    workers: int
    gpus: int
    utilisation: float
    figure_ms: float  # TTFT of prefill, time per token of decode, time of a search
    why: str


def plan(
    setup: Setup, search: SearchCosts, traffic: TrafficModel, targets: Targets, gpus_each: int = 1
) -> list[PoolPlan]:
    """Return the pools prefill, decode and retrieval; raises ConfigError if no number would
    suffice."""
    retrieval_pool = retrieval(search, traffic)
    searching_ms = (retrieval_pool.figure_ms + 2 * targets.hop_ms) * (traffic.searched > 0)
    return [
        prefill(setup, traffic, targets, searching_ms, gpus_each),
        decode(setup, traffic, targets, gpus_each),
        retrieval_pool,
    ]


def prompt_ms(setup: Setup, tokens: float) -> float:
    """Return the time of a prompt alone on a prefill worker."""
    costs = StepCosts(setup)
    steps = math.ceil(tokens / setup.prefill_chunk_tokens)
    computing_ms = max(costs.weights_ms * steps, costs.token_ms * tokens)
    exchange_ms = costs.exchange_ms * tokens
    return computing_ms + exchange_ms + costs.overhead_ms * steps + costs.pair_ms * tokens**2 / 2


def prefill(
    setup: Setup, traffic: TrafficModel, targets: Targets, searching_ms: float, gpus_each: int
) -> PoolPlan:
    """Return the fewest prefill workers whose queue lets first tokens meet their target.

    Raises ConfigError if an idle worker already misses it.
    """
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
    """Return the time per token in a batch, including the tokens that probes insert."""
    costs, probing = StepCosts(setup), traffic.probing
    a_token = traffic.probes / traffic.answer_tokens * probing.new_share * probing.new_tokens
    appended = batch * a_token
    step_ms = costs.fixed_ms(math.ceil(batch + appended))
    context = batch * traffic.context_tokens
    return step_ms + costs.kv_ms * context + costs.pair_ms * appended * traffic.context_tokens


def batch_of(setup: Setup, traffic: TrafficModel, workers: float) -> float | None:
    """Return the sequences on each decode worker, by Little's law; None if it never catches up."""
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
    """Return the fewest decode workers that keep the pace, with room for all answers in flight.

    Raises ConfigError if no number would suffice.
    """
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
    """Return the most answers on a decode worker at once, and the limit in words; raises
    ConfigError for 0."""
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
    """Return the fewest copies of the index that keep up; each takes a GPU per shard.

    Raises ConfigError if no number would suffice.
    """
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
    """Return the most requests/s of one decode worker, within its pace and its room."""
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
    """Return how many of the workers should prefill for the most requests/s, and that rate."""
    prompts = 1e3 / prompt_ms(setup, traffic.computed_tokens)
    answers = decode_per_s(setup, traffic, tpot_max_ms)
    rates = {n: min(n * prompts, (workers - n) * answers) for n in range(1, workers)}
    best = max(rates, key=lambda n: (rates[n], n))
    return best, rates[best]

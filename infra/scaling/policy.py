"""How many workers each pool wants, from the backlog and the arrival rate.

Theory of operation. The rate to serve is the arrival rate that routers count, plus the backlog
divided by the time in which it must be gone: `settle_ms`, or half of the least slack if that is
less. A queue whose oldest request has waited less than the TTFT target is no backlog: it comes from
chance.

Prefill workers compute prompts one after the other, so their work is the rate times the time of a
prompt. The policy wants the least number of workers whose queue lets 99 of 100 prompts meet the
TTFT target. Decode workers and replicas generate in batches. By Little's law, the answers in flight
are the rate times the duration of an answer. A batch is limited by the worker's slots, its KV
memory and the TPOT target. The answers in flight now must fit in any case. Searches are counted at
the workers and on the log; a worker's capacity is the rate at which it answers when it is full. All
times are those that routers have learned, so nothing here depends on an engine. All pools are
computed from the same rate: if one pool is too small, the others are not scaled to the rate that it
lets through. If the rate grows, the policy uses the rate at the time at which a new worker would be
ready. Each model has its own pools; they share `workers_max` by what they want.

Pure. `scaler.py` decides when a pool follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, floor
from typing import Any

from infra.scaling.ewma import MEMORY_MS
from infra.scaling.fleet_meter import FleetMeasurement, ModelMeasurement
from infra.scaling.pools import PoolLoad
from infra.scaling.queueing import BUSY_MAX, LATE, for_slots, waits_ms
from infra.scaling.settings import ScalingSettings
from schemas.records import Backlog, Role, WantedPool

SETTLE_MIN_MS = 2_000.0
SPLIT_GAIN = 1.15  # a worker moves if the fuller pool exceeds the best split by this factor


def wanted_pools(measured: FleetMeasurement, targets: ScalingSettings) -> list[WantedPool]:
    """Return the wanted size of every pool: of each model prefill before decode, then retrieval.

    A kind of which no worker is ready is left out, since the deployment may not use it.
    """
    groups = [_pools_of_model(model, targets) for model in measured.models]
    shares = model_shares(groups, targets.workers_max)
    capped = [_cap_workers(pools, share) for pools, share in zip(groups, shares, strict=True)]
    retrieval_pools = [] if not measured.shards else [_retrieval(measured.shards, targets)]
    return [*chain.from_iterable(capped), *retrieval_pools]


def _pools_of_model(measured: ModelMeasurement, targets: ScalingSettings) -> list[WantedPool]:
    backlog, pools = measured.backlog, measured.pools
    ahead_s = (MEMORY_MS + targets.start_ms) / 1_000
    coming = backlog.requests_per_s + max(0.0, measured.growth_per_s2) * ahead_s
    rate = coming + catching_up_per_s(backlog, targets)
    if pools[Role.PREFILL].present or pools[Role.DECODE].present:
        return [
            _prefill(backlog, rate, pools[Role.PREFILL], targets),
            _answering(Role.DECODE, backlog, rate, pools[Role.DECODE], targets),
        ]
    if not pools[Role.REPLICA].present:
        return []
    return [_answering(Role.REPLICA, backlog, rate, pools[Role.REPLICA], targets)]


def model_shares(groups: Sequence[Sequence[WantedPool]], workers_max: int) -> list[int]:
    """Return the most workers of each model, given the pools that it wants.

    Each pool has one. If not all that is wanted beyond that is there, models share the rest in
    proportion to what they want.
    """
    minimums = [len(pools) for pools in groups]
    wishes = [sum(pool.workers for pool in pools) - len(pools) for pools in groups]
    rest = max(0, workers_max - sum(minimums))
    if len(groups) == 1 or sum(wishes) <= rest:
        return [max(workers_max, count) for count in minimums]
    exact_shares = [rest * count / sum(wishes) for count in wishes]
    shares = [floor(share) for share in exact_shares]
    by_remainder = sorted(range(len(groups)), key=lambda n: shares[n] - exact_shares[n])
    for number in by_remainder[: rest - sum(shares)]:
        shares[number] += 1
    return [count + share for count, share in zip(minimums, shares, strict=True)]


def catching_up_per_s(backlog: Backlog, targets: ScalingSettings) -> float:
    """Return the requests/s to serve beside the arrivals, so that the backlog is gone in time."""
    if backlog.oldest_ms < targets.ttft_ms:
        return 0.0
    settle_ms = max(SETTLE_MIN_MS, min(targets.settle_ms, backlog.slack_ms / 2))
    return backlog.waiting * 1_000 / settle_ms


def _prefill(backlog: Backlog, rate: float, pool: PoolLoad, targets: ScalingSettings) -> WantedPool:
    alone_ms = backlog.prefill_ms
    work = rate * alone_ms / 1_000
    workers = for_work = max(1, ceil(work / BUSY_MAX))
    while 0 < alone_ms < targets.ttft_ms:  # else no number of workers would suffice
        late_ms = LATE * waits_ms(alone_ms, work / workers, workers)
        if alone_ms + late_ms <= targets.ttft_ms:
            break
        workers += 1
    why = f"{rate:.1f} prompts/s of {alone_ms:.0f} ms"
    if alone_ms >= targets.ttft_ms:
        why += f", which alone is more than {targets.ttft_ms} ms"
    elif workers > for_work:
        why += "; their queue decides"
    return _wanted_pool(Role.PREFILL, backlog, pool, workers=workers, work=work, why=why)


def _wanted_pool(role: Role, backlog: Backlog, pool: PoolLoad, **values: Any) -> WantedPool:
    return WantedPool(role=role, model=backlog.model, present=pool.present, **values)


@dataclass(frozen=True, slots=True)
class _BatchLimit:
    answers: float
    token_ms: float
    bound: str


def _batch(backlog: Backlog, pool: PoolLoad, targets: ScalingSettings) -> _BatchLimit:
    """Return the largest batch that one worker should run, and its time per token."""
    step_ms, sharing_ms = backlog.step_ms, backlog.sharing_ms
    bounds = [(max(1.0, pool.slots), "slots")]
    tokens = backlog.prompt_tokens + backlog.answer_tokens
    if pool.kv_tokens and tokens:
        bounds.append((max(1.0, pool.kv_tokens / tokens), "KV memory"))
    if targets.tpot_ms and sharing_ms and step_ms + sharing_ms <= targets.tpot_ms:
        bounds.append(((targets.tpot_ms - step_ms) / sharing_ms, "the time per token"))
    answers, bound = min(bounds)
    return _BatchLimit(answers, step_ms + sharing_ms * answers, bound)


def _answering(
    role: Role, backlog: Backlog, rate: float, pool: PoolLoad, targets: ScalingSettings
) -> WantedPool:
    batch = _batch(backlog, pool, targets)
    took_ms = backlog.answer_tokens * batch.token_ms + backlog.append_ms * batch.answers
    under_way = rate * took_ms / 1_000
    workers = for_coming = max(1, for_slots(under_way, batch.answers))
    why = f"{under_way:.1f} answers under way, {batch.answers:.1f} on each: {batch.bound}"
    if pool.slots:
        workers = max(workers, ceil(pool.under_way / pool.slots))
    if workers > for_coming:
        why += f"; {pool.under_way:.1f} are there now"
    if targets.tpot_ms and backlog.step_ms + backlog.sharing_ms > targets.tpot_ms:
        why += f"; a lone token takes more than {targets.tpot_ms:g} ms"
    work = under_way / batch.answers
    return _wanted_pool(role, backlog, pool, workers=workers, work=work, why=why)


def _retrieval(shards: tuple[PoolLoad, ...], targets: ScalingSettings) -> WantedPool:
    """Return as many copies of each shard as the busiest one wants, by load and by arrival rate.

    By load alone, copies would leave as soon as they have emptied the queue, and start again.
    """
    slots = max(1.0, max(pool.slots for pool in shards))
    under_way = max(pool.under_way for pool in shards)
    work, copies = under_way / slots, for_slots(under_way, slots)
    why = f"{under_way:.1f} searches under way on a shard, {slots:.0f} slots on each worker"
    busiest = max(shards, key=lambda pool: pool.per_s / pool.pace_per_s if pool.pace_per_s else 0)
    if busiest.pace_per_s:
        busy = busiest.per_s / busiest.pace_per_s
        work, copies = max(work, busy), max(copies, ceil(busy / BUSY_MAX))
        why += f"; {busiest.per_s:.0f}/s, and one can {busiest.pace_per_s:.0f}"
    return WantedPool(
        role=Role.RETRIEVAL,
        present=sum(pool.present for pool in shards),
        workers=min(targets.copies_max, max(1, copies)) * len(shards),
        work=work * len(shards),
        why=why,
    )


def _split(prefill: WantedPool, decode: WantedPool, workers: int) -> tuple[int, ...]:
    """Split the workers between two pools so that the fuller one is the least full.

    The present split stays if another gains little.
    """

    def fullest(first: int) -> float:
        return max(prefill.work / first, decode.work / (workers - first))

    best = min(range(1, workers), key=fullest)
    if prefill.present + decode.present == workers and 0 < prefill.present < workers:
        if fullest(prefill.present) <= SPLIT_GAIN * fullest(best):
            best = prefill.present
    return best, workers - best


def _cap_workers(pools: list[WantedPool], workers_max: int) -> list[WantedPool]:
    """Cap the workers of a model's pools together, but leave at least one to each."""
    workers_max = max(workers_max, len(pools))
    if sum(pool.workers for pool in pools) <= workers_max:
        return pools
    counts = (workers_max,) if len(pools) == 1 else _split(pools[0], pools[1], workers_max)
    return [
        replace(
            pool,
            workers=count,
            why=f"{pool.why}; {pool.workers} wanted, but {workers_max} workers are the most",
        )
        for pool, count in zip(pools, counts, strict=True)
    ]

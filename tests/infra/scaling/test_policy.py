"""How many workers each pool wants."""

from dataclasses import replace
from typing import Any

import pytest

from infra.scaling.fleet_meter import ModelMeasurement
from infra.scaling.policy import catching_up_per_s, model_shares
from infra.scaling.policy import wanted_pools as wanted_pools_of_fleet
from infra.scaling.pools import PoolLoad
from infra.scaling.settings import ScalingSettings
from schemas.records import Role, WantedPool
from tests.infra.scaling.samples import TARGETS, backlog, fleet_of, measured

PREFILL, DECODE, REPLICA, RETRIEVAL = Role.PREFILL, Role.DECODE, Role.REPLICA, Role.RETRIEVAL


def wanted_pools(
    measurement: ModelMeasurement, targets: ScalingSettings, shards: tuple[PoolLoad, ...] = ()
) -> list[WantedPool]:
    return wanted_pools_of_fleet(fleet_of(measurement, shards=shards), targets)


def counts(
    measurement: ModelMeasurement, shards: tuple[PoolLoad, ...] = (), **targets: Any
) -> dict[Role, int]:
    pools = wanted_pools(measurement, ScalingSettings(**targets), shards)
    return {pool.role: pool.workers for pool in pools}


def why(
    measurement: ModelMeasurement, role: Role, shards: tuple[PoolLoad, ...] = (), **targets: Any
) -> str:
    pools = wanted_pools(measurement, ScalingSettings(**targets), shards)
    return next(p.why for p in pools if p.role is role)


def test_prefill_pool_doubles_with_prompt_length() -> None:
    """The Neuron guide: "double the prefill servers"."""
    any_wait: dict[str, Any] = {"ttft_ms": 10_000, "workers_max": 16}
    before = counts(measured(requests_per_s=8.0), **any_wait)
    twice = measured(requests_per_s=8.0, prompt_tokens=2_000.0, prefill_ms=400.0)
    after = counts(twice, **any_wait)
    assert (before[PREFILL], after[PREFILL]) == (2, 4)
    assert before[DECODE] == after[DECODE]


def test_policy_balances_one_prefill_with_two_decode_workers() -> None:
    """The Neuron guide: 1P2D is in balance. One worker prefills 4 prompts/s, one decodes 2/s."""
    paces: dict[str, Any] = {"prefill_ms": 250.0, "step_ms": 32.0, "sharing_ms": 1.0}  # 40 ms of 8
    at_most = measured(requests_per_s=4.0, **paces)
    below = measured(requests_per_s=3.0, **paces)
    assert counts(below, ttft_ms=10_000) == {PREFILL: 1, DECODE: 2}
    assert counts(at_most, workers_max=3) == {PREFILL: 1, DECODE: 2}
    twice = measured(requests_per_s=8.0, **paces)
    assert counts(twice, workers_max=6) == {PREFILL: 2, DECODE: 4}
    busy = {pool.role: pool.work for pool in wanted_pools(at_most, TARGETS)}
    assert busy == {PREFILL: pytest.approx(1.0), DECODE: pytest.approx(2.0)}


def test_policy_keeps_one_worker_per_pool_without_requests() -> None:
    assert counts(measured(requests_per_s=0.0)) == {PREFILL: 1, DECODE: 1}


def test_policy_scales_ahead_of_growing_request_rate() -> None:
    grows = replace(measured(), growth_per_s2=0.1)  # 3 more per second, 30 s on
    assert [pool.work for pool in wanted_pools(grows, TARGETS)] == [
        pool.work for pool in wanted_pools(measured(requests_per_s=7.0), TARGETS)
    ]
    assert wanted_pools(replace(measured(), growth_per_s2=-0.1), TARGETS) == wanted_pools(
        measured(), TARGETS
    )


@pytest.mark.parametrize(
    ("waits", "more_per_s"),
    [
        ({"waiting": 0, "oldest_ms": 0}, 0),
        ({"waiting": 50, "oldest_ms": 900, "slack_ms": 30_000}, 0),  # younger than a first token
        ({"waiting": 50, "oldest_ms": 2_000, "slack_ms": 30_000}, 5),  # gone in 10 s
        ({"waiting": 50, "oldest_ms": 2_000, "slack_ms": 8_000}, 12.5),  # in half of the slack
        ({"waiting": 50, "oldest_ms": 60_000, "slack_ms": 0}, 25),  # as soon as makes sense
    ],
)
def test_backlog_adds_rate_that_clears_queue_in_time(
    waits: dict[str, int], more_per_s: float
) -> None:
    assert catching_up_per_s(backlog(**waits), TARGETS) == more_per_s


def test_backlog_grows_prefill_and_decode_pools() -> None:
    waits = {"waiting": 60, "oldest_ms": 3_000, "slack_ms": 60_000}
    calm, late = counts(measured(), workers_max=16), counts(measured(**waits), workers_max=16)
    assert late[PREFILL] > calm[PREFILL] and late[DECODE] > calm[DECODE]


def test_prefill_queue_decides_size_of_small_pool() -> None:
    slow = measured(requests_per_s=0.75, prefill_ms=800.0)
    assert counts(slow)[PREFILL] == 3
    assert "their queue decides" in why(slow, PREFILL)
    assert counts(slow, ttft_ms=5_000)[PREFILL] == 1


def test_policy_reports_unreachable_latency_targets() -> None:
    """One prompt alone, or one token, takes longer than the target."""
    late = measured(prefill_ms=1_500.0, requests_per_s=1.0)
    assert counts(late)[PREFILL] == 2
    assert "alone is more than 1000 ms" in why(late, PREFILL)
    slow = why(measured(), DECODE, tpot_ms=25.0)
    assert "a lone token takes more than 25 ms" in slow and "slots" in slow


def test_decode_batch_is_bounded_by_slots_memory_and_tpot_target() -> None:
    measurement = measured(slots=64)
    assert "slots" in why(measurement, DECODE)
    assert "the time per token" in why(measurement, DECODE, tpot_ms=50.0)
    pools = {**measurement.pools, DECODE: replace(measurement.pools[DECODE], kv_tokens=5_500.0)}
    assert "5.0 on each: KV memory" in why(replace(measurement, pools=pools), DECODE)
    assert counts(measurement, tpot_ms=50.0)[DECODE] > counts(measurement)[DECODE]


def test_decode_pool_fits_requests_in_flight() -> None:
    """No answer has ended yet, so that their length is unknown."""
    new = measured(answer_tokens=0.0)
    busy_pools = {**new.pools, DECODE: PoolLoad(present=2, slots=8, under_way=30.0)}
    assert counts(new)[DECODE] == 1
    assert counts(replace(new, pools=busy_pools))[DECODE] == 4
    assert "30.0 are there now" in why(replace(new, pools=busy_pools), DECODE)


def test_decode_pool_counts_prompts_computed_locally() -> None:
    local = measured(prefill_ms=0.0, append_ms=400.0)
    assert counts(local)[PREFILL] == 1
    assert counts(local)[DECODE] > counts(measured())[DECODE]


def test_replica_pool_counts_prefill_and_decode_work() -> None:
    measurement = measured(prefill=0, decode=0, replica=2, prefill_ms=0.0, append_ms=200.0)
    (pool,) = wanted_pools(measurement, TARGETS)
    assert (pool.role, pool.present) == (REPLICA, 2)
    assert pool.work == pytest.approx(4 * (0.2 + 100 * 0.050 / 8))
    assert counts(measurement, workers_max=2) == {REPLICA: 2}


def test_policy_plans_no_pools_without_workers() -> None:
    """After an outage all leases may have ended, which does not tell what pools exist."""
    assert counts(measured(prefill=0, decode=0)) == {}
    assert counts(measured(prefill=0, decode=1)).keys() == {PREFILL, DECODE}


def test_policy_keeps_one_worker_per_pool_beyond_workers_max() -> None:
    assert counts(measured(requests_per_s=20.0), workers_max=1) == {PREFILL: 1, DECODE: 1}


def test_retrieval_pool_gives_each_shard_copies_of_busiest_shard() -> None:
    shards = tuple(PoolLoad(present=1, slots=8, under_way=under_way) for under_way in (3.0, 12.0))
    assert counts(measured(), shards)[RETRIEVAL] == 2 * 2
    assert counts(measured(), shards, copies_max=1)[RETRIEVAL] == 2
    idle = (PoolLoad(present=1), PoolLoad(present=1))
    assert counts(measured(), idle)[RETRIEVAL] == 2


def test_retrieval_pool_keeps_copies_while_one_cannot_serve_rate() -> None:
    """The load says that two copies are too many, the rate that one is too few."""
    calm = PoolLoad(present=2, slots=8, under_way=3.0, per_s=440.0)
    assert counts(measured(), (calm,))[RETRIEVAL] == 1
    paced = (replace(calm, pace_per_s=400.0),)
    assert counts(measured(), paced)[RETRIEVAL] == 2
    assert "440/s, and one can 400" in why(measured(), RETRIEVAL, paced)
    idle = (replace(calm, per_s=100.0, pace_per_s=400.0), PoolLoad())
    assert counts(measured(), idle)[RETRIEVAL] == 2, "one for each shard"


def by_model(*models: ModelMeasurement, workers_max: int) -> dict[str, dict[Role, int]]:
    targets = ScalingSettings(workers_max=workers_max)
    pools = wanted_pools_of_fleet(fleet_of(*models), targets)
    result: dict[str, dict[Role, int]] = {}
    for pool in pools:
        result.setdefault(pool.model, {})[pool.role] = pool.workers
    return result


def test_each_model_gets_what_it_wants_where_all_fits() -> None:
    calm, busy = measured(model="a"), measured(model="b", requests_per_s=8.0)
    alone = {"a": counts(calm, workers_max=30), "b": counts(busy, workers_max=30)}
    assert by_model(calm, busy, workers_max=30) == alone
    assert sum(alone["b"].values()) > sum(alone["a"].values())


def test_models_share_workers_by_what_they_want() -> None:
    calm, busy = measured(model="a"), measured(model="b", requests_per_s=16.0)
    idle = measured(model="c", requests_per_s=0.0)
    shared = by_model(calm, busy, idle, workers_max=12)
    totals = {model: sum(pools.values()) for model, pools in shared.items()}
    assert sum(totals.values()) == 12
    assert totals["c"] == 2, "one for each pool"
    assert totals["b"] > totals["a"] > 2
    pools = wanted_pools_of_fleet(fleet_of(calm, busy, idle), ScalingSettings(workers_max=12))
    assert "workers are the most" in pools[0].why and pools[0].model == "a"


def test_model_without_workers_takes_none_of_others() -> None:
    away = measured(prefill=0, decode=0, model="b", requests_per_s=50.0)
    assert by_model(measured(model="a"), away, workers_max=6).keys() == {"a"}


@pytest.mark.parametrize(
    ("wants", "workers_max", "shares"),
    [
        ([[2, 2]], 3, [3]),
        ([[2, 2], [1, 1]], 6, [6, 6]),
        ([[9, 9], [1, 1]], 6, [4, 2]),
        ([[3, 3], [3, 3]], 7, [4, 3]),
        ([[9], [3], []], 6, [4, 2, 0]),
        ([[9, 9], [9, 9]], 1, [2, 2]),
        ([], 8, []),
    ],
)
def test_share_of_a_model_follows_its_wants(
    wants: list[list[int]], workers_max: int, shares: list[int]
) -> None:
    groups = [
        [WantedPool(role=DECODE, present=0, workers=n, work=0.0, why="") for n in pools]
        for pools in wants
    ]
    assert model_shares(groups, workers_max) == shares


def test_policy_moves_worker_at_bound_only_for_gain() -> None:
    """Otherwise the worker would move to and fro."""
    near: dict[str, Any] = {"requests_per_s": 20.0, "answer_tokens": 32.0}
    for prefill in (4, 5):
        there = measured(prefill=prefill, decode=9 - prefill, **near)
        assert counts(there, workers_max=9) == {PREFILL: prefill, DECODE: 9 - prefill}
    far = measured(prefill=2, decode=7, **near)
    assert counts(far, workers_max=9) == {PREFILL: 4, DECODE: 5}
    assert "but 9 workers are the most" in why(far, PREFILL, workers_max=9)

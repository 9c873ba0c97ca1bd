"""How many workers each pool wants."""

from dataclasses import replace
from typing import Any

import pytest

from infra.scaling.fleet_meter import FleetMeasurement
from infra.scaling.policy import catching_up_per_s, wanted_pools
from infra.scaling.pools import PoolLoad
from infra.scaling.settings import ScalingSettings
from schemas.records import Role
from tests.infra.scaling.samples import TARGETS, backlog, measured

PREFILL, DECODE, REPLICA, RETRIEVAL = Role.PREFILL, Role.DECODE, Role.REPLICA, Role.RETRIEVAL


def counts(found: FleetMeasurement, **targets: Any) -> dict[Role, int]:
    return {pool.role: pool.workers for pool in wanted_pools(found, ScalingSettings(**targets))}


def why(found: FleetMeasurement, role: Role, **targets: Any) -> str:
    return next(p.why for p in wanted_pools(found, ScalingSettings(**targets)) if p.role is role)


def test_where_prompts_double_in_length_prefill_does_too() -> None:
    """The Neuron guide: "double the prefill servers"."""
    any_wait: dict[str, Any] = {"ttft_ms": 10_000, "workers_max": 16}
    before = counts(measured(requests_per_s=8.0), **any_wait)
    twice = measured(requests_per_s=8.0, prompt_tokens=2_000.0, prefill_ms=400.0)
    after = counts(twice, **any_wait)
    assert (before[PREFILL], after[PREFILL]) == (2, 4)
    assert before[DECODE] == after[DECODE]


def test_four_prefills_against_two_decodes_per_second_are_one_and_two() -> None:
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


def test_a_lull_wants_one_of_each() -> None:
    assert counts(measured(requests_per_s=0.0)) == {PREFILL: 1, DECODE: 1}


def test_where_more_and_more_comes_it_is_met_when_it_is_there() -> None:
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
def test_what_waits_is_to_be_gone_in_time(waits: dict[str, int], more_per_s: float) -> None:
    assert catching_up_per_s(backlog(**waits), TARGETS) == more_per_s


def test_a_backlog_wants_all_pools_to_grow_whichever_held_it_up() -> None:
    waits = {"waiting": 60, "oldest_ms": 3_000, "slack_ms": 60_000}
    calm, late = counts(measured(), workers_max=16), counts(measured(**waits), workers_max=16)
    assert late[PREFILL] > calm[PREFILL] and late[DECODE] > calm[DECODE]


def test_the_queue_of_a_few_prefill_workers_decides_before_their_time_does() -> None:
    slow = measured(requests_per_s=0.75, prefill_ms=800.0)
    assert counts(slow)[PREFILL] == 3
    assert "their queue decides" in why(slow, PREFILL)
    assert counts(slow, ttft_ms=5_000)[PREFILL] == 1


def test_what_no_number_of_workers_gives_is_said_and_moves_nothing() -> None:
    """A prompt that alone takes longer than the target, a token that does."""
    late = measured(prefill_ms=1_500.0, requests_per_s=1.0)
    assert counts(late)[PREFILL] == 2
    assert "alone is more than 1000 ms" in why(late, PREFILL)
    slow = why(measured(), DECODE, tpot_ms=25.0)
    assert "a lone token takes more than 25 ms" in slow and "slots" in slow


def test_a_batch_is_bounded_by_slots_memory_and_the_target_of_a_token() -> None:
    found = measured(slots=64)
    assert "slots" in why(found, DECODE)
    assert "the time per token" in why(found, DECODE, tpot_ms=50.0)
    pools = {**found.pools, DECODE: replace(found.pools[DECODE], kv_tokens=5_500.0)}
    assert "5.0 on each: KV memory" in why(replace(found, pools=pools), DECODE)
    assert counts(found, tpot_ms=50.0)[DECODE] > counts(found)[DECODE]


def test_what_decode_workers_hold_fits_in_any_case() -> None:
    """Before the first answers have ended nobody knows how long they are."""
    new = measured(answer_tokens=0.0)
    held = {**new.pools, DECODE: PoolLoad(present=2, slots=8, under_way=30.0)}
    assert counts(new)[DECODE] == 1
    assert counts(replace(new, pools=held))[DECODE] == 4
    assert "30.0 are there now" in why(replace(new, pools=held), DECODE)


def test_prompts_that_decode_workers_compute_count_there() -> None:
    local = measured(prefill_ms=0.0, append_ms=400.0)
    assert counts(local)[PREFILL] == 1
    assert counts(local)[DECODE] > counts(measured())[DECODE]


def test_replicas_do_both() -> None:
    found = measured(prefill=0, decode=0, replica=2, prefill_ms=0.0, append_ms=200.0)
    (pool,) = wanted_pools(found, TARGETS)
    assert (pool.role, pool.present) == (REPLICA, 2)
    assert pool.work == pytest.approx(4 * (0.2 + 100 * 0.050 / 8))
    assert counts(found, workers_max=2) == {REPLICA: 2}


def test_where_nobody_lives_nobody_is_wanted() -> None:
    """After an outage all leases may have ended: that says nothing of which pools there are."""
    assert counts(measured(prefill=0, decode=0)) == {}
    assert counts(measured(prefill=0, decode=1)).keys() == {PREFILL, DECODE}


def test_of_each_pool_there_is_one_however_few_there_may_be() -> None:
    assert counts(measured(requests_per_s=20.0), workers_max=1) == {PREFILL: 1, DECODE: 1}


def test_every_shard_gets_as_many_copies_as_the_busiest_wants() -> None:
    shards = tuple(PoolLoad(present=1, slots=8, under_way=under_way) for under_way in (3.0, 12.0))
    found = replace(measured(), shards=shards)
    assert counts(found)[RETRIEVAL] == 2 * 2
    assert counts(found, copies_max=1)[RETRIEVAL] == 2
    idle = replace(measured(), shards=(PoolLoad(present=1), PoolLoad(present=1)))
    assert counts(idle)[RETRIEVAL] == 2


def test_copies_that_emptied_the_queue_stay_as_long_as_one_could_not_hold_it() -> None:
    """What they hold says that two are too many; what comes says that one is too few."""
    calm = PoolLoad(present=2, slots=8, under_way=3.0, per_s=440.0)
    assert counts(replace(measured(), shards=(calm,)))[RETRIEVAL] == 1
    known = replace(measured(), shards=(replace(calm, pace_per_s=400.0),))
    assert counts(known)[RETRIEVAL] == 2
    assert "440/s, and one can 400" in why(known, RETRIEVAL)
    idle = replace(measured(), shards=(replace(calm, per_s=100.0, pace_per_s=400.0), PoolLoad()))
    assert counts(idle)[RETRIEVAL] == 2, "one for each shard"


def test_at_the_bound_a_worker_moves_only_where_that_gains_something() -> None:
    """Else it would go to and fro."""
    near: dict[str, Any] = {"requests_per_s": 20.0, "answer_tokens": 32.0}
    for prefill in (4, 5):
        there = measured(prefill=prefill, decode=9 - prefill, **near)
        assert counts(there, workers_max=9) == {PREFILL: prefill, DECODE: 9 - prefill}
    far = measured(prefill=2, decode=7, **near)
    assert counts(far, workers_max=9) == {PREFILL: 4, DECODE: 5}
    assert "but 9 workers are the most" in why(far, PREFILL, workers_max=9)

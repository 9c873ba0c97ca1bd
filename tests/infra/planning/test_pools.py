"""How pools are sized: properties of the sums."""

from dataclasses import replace

import pytest

from infra.planning.hardware import IndexSpec, SearchCosts
from infra.planning.pools import (
    ProbeSettings,
    Targets,
    TrafficModel,
    batch_of,
    decode_per_s,
    plan,
    prompt_ms,
    split,
    tpot_ms,
)
from infra.scaling.queueing import BUSY_MAX
from infra.simulator.machine.latency import QWEN_30B, Setup

TRAFFIC = TrafficModel(per_s=60, prompt_tokens=1_000, answer_tokens=256)
SEARCH = SearchCosts()


@pytest.mark.parametrize("per_s", [1, 10, 60, 240])
def test_pools_stay_below_busy_limit_and_meet_targets(per_s: float) -> None:
    targets = Targets()
    prefill, decode, retrieval = plan(Setup(), SEARCH, replace(TRAFFIC, per_s=per_s), targets)
    assert prefill.utilisation <= BUSY_MAX >= decode.utilisation
    assert retrieval.utilisation <= BUSY_MAX
    assert prefill.figure_ms <= targets.ttft_ms
    assert decode.figure_ms <= targets.tpot_ms


def test_pools_miss_limits_with_one_worker_less() -> None:
    prefill, decode, _ = plan(Setup(), SEARCH, TRAFFIC, Targets())
    busy = TRAFFIC.per_s * prompt_ms(Setup(), TRAFFIC.computed_tokens) / 1e3
    assert busy / (prefill.workers - 1) > BUSY_MAX
    batch = batch_of(Setup(), TRAFFIC, decode.workers - 1)
    assert batch is None or tpot_ms(Setup(), TRAFFIC, batch) > Targets().tpot_ms


def test_active_answers_follow_littles_law() -> None:
    batch = batch_of(Setup(), TRAFFIC, 4)
    assert batch is not None
    took_s = TRAFFIC.answer_tokens * tpot_ms(Setup(), TRAFFIC, batch) / 1e3
    assert batch == pytest.approx(TRAFFIC.per_s / 4 * took_s, rel=0.01)
    assert batch_of(Setup(), TRAFFIC, 0.1) is None, "it never catches up"


def test_probes_need_decode_workers_and_updates_need_copies() -> None:
    plain = replace(TRAFFIC, probing=ProbeSettings(every=0), per_s=200)
    probed = replace(TRAFFIC, probing=ProbeSettings(every=8), per_s=200)
    counts = [plan(Setup(), SEARCH, traffic, Targets())[1].workers for traffic in (plain, probed)]
    assert counts[1] > counts[0]
    heavy = SearchCosts(index=IndexSpec(top_m=128 * 256, width=4 * 256))
    calm = plan(Setup(), heavy, TRAFFIC, Targets())[2]
    busy = plan(Setup(), heavy, replace(TRAFFIC, updates_per_s=800.0), Targets())[2]
    assert busy.workers > calm.workers


def test_sparse_model_is_quicker_than_dense_model() -> None:
    """All weights of the experts are read, but few are computed with."""
    sparse = Setup(model=QWEN_30B)
    dense = Setup(model=replace(QWEN_30B, active_parameters=0.0))
    assert prompt_ms(sparse, 4_000) < 0.5 * prompt_ms(dense, 4_000)


def test_split_maximises_served_requests() -> None:
    prefill, per_s = split(Setup(), TRAFFIC, 15, 25.0)
    prompts = 1e3 / prompt_ms(Setup(), TRAFFIC.computed_tokens)
    answers = decode_per_s(Setup(), TRAFFIC, 25.0)
    for prefill_count in range(1, 15):
        assert min(prefill_count * prompts, (15 - prefill_count) * answers) <= per_s
    assert per_s == min(prefill * prompts, (15 - prefill) * answers)

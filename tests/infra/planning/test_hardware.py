"""What placements are computed from: its sums, and what it refuses."""

import pytest

from infra.planning.hardware import (
    IndexSpec,
    SearchCosts,
    experts,
    gpu_named,
    model_named,
    parallel,
)
from infra.planning.pools import prompt_ms
from infra.simulator.machine.latency import QWEN_30B, Setup, StepCosts
from schemas.errors import ConfigError


def test_extend_time_grows_with_bytes_above_floor() -> None:
    costs = SearchCosts()
    assert costs.extend_ms(1) == costs.extend_ms(64) == costs.floor_ms
    assert costs.extend_ms(2_048) == pytest.approx(2 * costs.extend_ms(1_024))


def test_index_has_as_many_shards_as_needed_gpus() -> None:
    assert SearchCosts(index=IndexSpec(rows=10e6)).shards == 1
    assert SearchCosts(index=IndexSpec(rows=60e6)).shards == 2


def test_collectives_cost_larger_share_with_more_gpus() -> None:
    alone = [prompt_ms(parallel(Setup(), degree), 2_000) for degree in (1, 2, 4, 8)]
    assert alone == sorted(alone, reverse=True)
    assert alone[3] > alone[0] / 8, "collectives are paid for"
    crossing = prompt_ms(parallel(Setup(), 8, 1), 2_000)
    assert crossing > 3 * alone[3], "a ring is as slow as its slowest link"


def test_displaced_experts_cost_time_and_kv_bandwidth() -> None:
    setup = Setup(model=QWEN_30B)
    home, half = experts(setup, 8), experts(setup, 8, 0.5)
    assert prompt_ms(half, 2_000) > prompt_ms(home, 2_000)
    assert half.link.bytes_per_s < home.link.bytes_per_s
    with pytest.raises(ConfigError, match="displaced experts: expected a share from 0 to 1"):
        experts(setup, 8, 1.5)


def test_gpu_and_model_lookup_refuse_unknown_names() -> None:
    assert gpu_named("h100").name == "H100 SXM"
    with pytest.raises(ConfigError, match="--gpu: expected one of h100, .* found 'tpu'"):
        gpu_named("tpu")
    with pytest.raises(ConfigError, match="--model: expected one of llama-8b, .* found 'x'"):
        model_named("x")


@pytest.mark.parametrize("setup", [Setup(), parallel(Setup(), 8, 1), experts(Setup(), 8, 0.25)])
def test_simulated_step_equals_computed_prompt_time(setup: Setup) -> None:
    """The time includes exchanges between the GPUs of a worker."""
    step_ms = StepCosts(setup).step_ms(
        decoding=0, context_tokens=0, chunk_tokens=2_000, pairs=2_000 * 2_000 / 2
    )
    assert step_ms == pytest.approx(prompt_ms(setup, 2_000))

"""What placements are computed from: its sums, and what it refuses."""

import pytest

from infra.evaluate.trinity.hardware import (
    IndexSpec,
    SearchCosts,
    experts,
    gpu_named,
    model_named,
    parallel,
)
from infra.evaluate.trinity.pools import prompt_ms
from infra.simulator.machine.latency import QWEN_30B, Setup, StepCosts
from schemas.errors import ConfigError


def test_an_extend_has_a_floor_and_then_takes_as_long_as_its_bytes() -> None:
    costs = SearchCosts()
    assert costs.extend_ms(1) == costs.extend_ms(64) == costs.floor_ms
    assert costs.extend_ms(2_048) == pytest.approx(2 * costs.extend_ms(1_024))


def test_an_index_is_cut_into_as_many_shards_as_it_needs_gpus() -> None:
    assert SearchCosts(index=IndexSpec(rows=10e6)).shards == 1
    assert SearchCosts(index=IndexSpec(rows=60e6)).shards == 2


def test_collectives_take_a_larger_part_the_more_gpus_a_worker_has() -> None:
    alone = [prompt_ms(parallel(Setup(), degree), 2_000) for degree in (1, 2, 4, 8)]
    assert alone == sorted(alone, reverse=True)
    assert alone[3] > alone[0] / 8, "collectives are paid for"
    crossing = prompt_ms(parallel(Setup(), 8, 1), 2_000)
    assert crossing > 3 * alone[3], "a ring is as slow as its slowest link"


def test_displaced_experts_cost_time_and_the_kv_link() -> None:
    setup = Setup(model=QWEN_30B)
    home, half = experts(setup, 8), experts(setup, 8, 0.5)
    assert prompt_ms(half, 2_000) > prompt_ms(home, 2_000)
    assert half.link.bytes_per_s < home.link.bytes_per_s
    with pytest.raises(ConfigError, match="displaced experts: expected a share from 0 to 1"):
        experts(setup, 8, 1.5)


def test_names_that_nobody_knows_are_refused_in_words() -> None:
    assert gpu_named("h100").name == "H100 SXM"
    with pytest.raises(ConfigError, match="--gpu: expected one of h100, .* found 'tpu'"):
        gpu_named("tpu")
    with pytest.raises(ConfigError, match="--model: expected one of llama-8b, .* found 'x'"):
        model_named("x")


@pytest.mark.parametrize("setup", [Setup(), parallel(Setup(), 8, 1), experts(Setup(), 8, 0.25)])
def test_a_simulated_step_takes_what_the_sums_say_of_a_prompt(setup: Setup) -> None:
    """Exchanges of a worker's GPUs included."""
    step_ms = StepCosts(setup).step_ms(
        decoding=0, context_tokens=0, chunk_tokens=2_000, pairs=2_000 * 2_000 / 2
    )
    assert step_ms == pytest.approx(prompt_ms(setup, 2_000))

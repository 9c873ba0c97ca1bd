"""The simulated engine: steps solved in bulk equal steps taken one by one, and a roofline."""

import pytest

from infra.simulator.log.clock import Clock
from infra.simulator.machine.gpu import GpuSequence, SimGpu
from infra.simulator.machine.latency import Setup, StepCosts

SETUP = Setup()
COSTS = StepCosts(SETUP)


class Desk:
    """Run an engine, and note when its prompts and answers end."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.prompts: dict[object, float] = {}
        self.answers: dict[object, float] = {}
        self.gpu = SimGpu(self.clock, COSTS, self._prompt, self._answer)
        self.gpu.chunk_tokens = SETUP.mixed_chunk_tokens

    def _prompt(self, sequence: GpuSequence) -> bool:
        self.prompts[sequence.owner] = self.clock.now_ms
        return True

    def _answer(self, sequence: GpuSequence) -> None:
        self.answers[sequence.owner] = self.clock.now_ms

    def run(self) -> None:
        while self.clock.step():
            pass


def stepped(batch: list[tuple[int, int]]) -> list[float]:
    """Return the end times of sequences of (context, tokens), taken step by step."""
    remaining_tokens = {i: tokens for i, (_, tokens) in enumerate(batch)}
    context = {i: prompt + 1 for i, (prompt, _) in enumerate(batch)}
    ends, now_ms = [0.0] * len(batch), 0.0
    while remaining_tokens:
        total = sum(context[i] for i in remaining_tokens)
        now_ms += COSTS.step_ms(decoding=len(remaining_tokens), context_tokens=total)
        for i in list(remaining_tokens):
            context[i] += 1
            remaining_tokens[i] -= 1
            if not remaining_tokens[i]:
                del remaining_tokens[i]
                ends[i] = now_ms
    return ends


def test_gpu_bulk_steps_equal_single_steps() -> None:
    batch = [(100, 7), (2_000, 40), (50, 40), (900, 133)]
    # whoever comes during a run joins after its current step, so give all of them at a boundary
    desk = Desk()
    desk.gpu._joining = [GpuSequence(i, p, p, n) for i, (p, n) in enumerate(batch)]
    desk.gpu._interrupt()
    desk.run()
    assert [desk.answers[i] for i in range(len(batch))] == pytest.approx(stepped(batch))


def test_gpu_interrupts_bulk_run_on_arrival() -> None:
    desk = Desk()
    desk.gpu.add_answer(GpuSequence("a", 1_000, 1_000, 50))
    desk.clock.at(20.0, lambda: desk.gpu.add_answer(GpuSequence("b", 10, 10, 1)))
    desk.run()
    step_ms = COSTS.step_ms(decoding=1, context_tokens=1_001)
    assert 20.0 < desk.answers["b"] < 20.0 + 2.1 * step_ms
    assert desk.answers["a"] > 50 * step_ms
    assert desk.gpu.batch == desk.gpu.context_tokens == 0


def test_gpu_keeps_nothing_of_removed_sequences() -> None:
    desk = Desk()
    first, second = GpuSequence("a", 500, 500, 400), GpuSequence("b", 3_000, 0, 400)
    desk.gpu.add_answer(first)
    desk.gpu.add_prompt(second)
    desk.clock.at(100.0, lambda: desk.gpu.remove(first))
    desk.clock.at(200.0, lambda: desk.gpu.remove(second))
    desk.run()
    assert not desk.answers and "b" in desk.prompts
    assert desk.gpu.batch == desk.gpu.context_tokens == 0


def test_gpu_chunks_prompt_beside_decoding_batch() -> None:
    desk = Desk()
    desk.gpu.add_answer(GpuSequence("a", 1_000, 1_000, 30))
    desk.gpu.add_prompt(GpuSequence("b", 2_000, 0, 1))
    desk.run()
    alone = stepped([(1_000, 30)])[0]
    assert desk.answers["a"] > alone + 2_000 * COSTS.token_ms - 4 * COSTS.weights_ms
    assert desk.prompts["b"] > 3 * COSTS.token_ms * 511


@pytest.mark.parametrize(("tokens", "bound"), [(1, "memory"), (4_096, "compute")])
def test_step_costs_follow_roofline(tokens: int, bound: str) -> None:
    """One token waits for the weights, thousands for arithmetic; the data sheet bounds both."""
    took_ms = COSTS.fixed_ms(tokens) - COSTS.overhead_ms
    read_ms = 1e3 * 2 * 8.03e9 / 3.35e12
    compute_ms = 1e3 * 2 * 8.03e9 * tokens / 989.5e12
    least_ms = read_ms if bound == "memory" else compute_ms
    assert max(read_ms, compute_ms) == least_ms
    assert least_ms < took_ms < 2 * least_ms


def test_setup_has_kv_sizes_of_model() -> None:
    assert SETUP.model.kv_bytes_per_token == 131_072
    assert 400_000 < SETUP.kv_blocks * SETUP.block_tokens < 450_000
    assert SETUP.transfer_ms(0) == SETUP.link.latency_ms

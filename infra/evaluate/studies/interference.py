"""Figure 2: how much prompts slow a running batch, measured on the simulated engine.

A batch of 200 decodes; then one or four prompts are computed beside it, from the start (full) or
behind a cached history (append). The slow-down is that of the steps while a prompt is under way.

The authors say that full and append process as many tokens, and find that the one costs a lot and
the other next to nothing. On a roofline such prompts cost the same but for attention. So a second
reading is shown beside it: few new tokens behind as much context (short append).
"""

from infra.evaluate.paper.ppd_paper import FIGURE_2_BATCH, FIGURE_2_TOKENS
from infra.simulator.log.clock import Clock
from infra.simulator.machine.gpu import Gpu, Sequence
from infra.simulator.machine.latency import Setup, StepCosts

CONTEXT_TOKENS = 1_024  # of each sequence of the batch
SHORT_TOKENS = 48  # a short question


def slow_downs(setup: Setup) -> dict[str, float]:
    """Percent by kind and number of prompts."""
    found = {}
    for count in (1, 4):
        found[f"full x{count}"] = _slow_down(setup, FIGURE_2_TOKENS, 0, count)
        for name, tokens in (("append", FIGURE_2_TOKENS), ("short append", SHORT_TOKENS)):
            found[f"{name} x{count}"] = _slow_down(setup, tokens, FIGURE_2_TOKENS, count)
    return found


def by_length(setup: Setup, lengths: tuple[int, ...]) -> list[tuple[int, float]]:
    """Appended tokens and the slow-down of one such append."""
    return [(tokens, _slow_down(setup, tokens, FIGURE_2_TOKENS, 1)) for tokens in lengths]


def _slow_down(setup: Setup, tokens: int, cached: int, count: int) -> float:
    clock = Clock()
    ended_ms: list[float] = []

    def prompt_done(sequence: Sequence) -> bool:
        ended_ms.append(clock.now_ms)
        return False

    gpu = Gpu(clock, StepCosts(setup), prompt_done, lambda sequence: None)
    gpu.chunk_tokens = setup.mixed_chunk_tokens
    for i in range(FIGURE_2_BATCH):
        gpu.add_answer(Sequence(i, CONTEXT_TOKENS, CONTEXT_TOKENS, 1_000))
    while gpu.batch < FIGURE_2_BATCH:
        clock.step()
    for i in range(count):
        gpu.add_prompt(Sequence(-i, cached + tokens, cached, 1))
    under_way = gpu.steps
    while gpu.steps == under_way:  # the step during which they came
        clock.step()
    began_ms, first_step = clock.now_ms, gpu.steps
    alone_ms = StepCosts(setup).step_ms(decoding=FIGURE_2_BATCH, context_tokens=gpu.context_tokens)
    while len(ended_ms) < count:
        clock.step()
    mean_ms = (ended_ms[-1] - began_ms) / (gpu.steps - first_step)
    return 100 * (mean_ms / alone_ms - 1)

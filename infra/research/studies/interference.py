"""Figures 2, 6 and 7: how much prompts slow a running batch, measured on the simulated engine.

A batch decodes; then one prompt (figure 2) or four (figure 6) of 1 024 new tokens are computed
beside it, whole (full) or after a cached history (append; short append: few new tokens). In figure
7 the history of batch and append grows. The figures are the slow-down of steps while a prompt is
computed, and that of the mean time per token of answers of 64 tokens that begin with the prompts,
which the authors' script measures. The latter is given twice: with each sequence reading its own
context, and with a shared context read once, as vLLM did at that time if all running sequences had
one context, as in that script, until a prompt arrived that does not share it.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from infra.research.paper.ppd_paper import FIGURE_2_BATCH, FIGURE_2_TOKENS, FIGURE_7_BATCH
from infra.simulator.log.clock import Clock
from infra.simulator.machine.gpu import GpuSequence, SimGpu
from infra.simulator.machine.latency import Setup, StepCosts

CONTEXT_TOKENS = 2_048  # context of each sequence of the batch, and of an append
SHORT_TOKENS = 48  # a short question
ANSWER_TOKENS = 64  # of each sequence of the batch, as the authors measure
LONG_ANSWER_TOKENS = 100_000  # so long that none ends during the measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDown:
    """The slow-down of a batch by prompts beside it, in percent."""

    prompts: int
    kind: str  # full, append or short append
    context_tokens: int  # of the batch, and before an append
    steps: float  # of steps while a prompt is computed
    answers: float  # of answers that begin with the prompts
    shared: float  # likewise, if the shared context is read once


def slow_downs(setup: Setup) -> list[SlowDown]:
    """Return figures 2 and 6: by kind and number of prompts."""
    return [
        _slow_down(setup, FIGURE_2_BATCH, CONTEXT_TOKENS, kind, count)
        for count in (1, 4)
        for kind in _PROMPTS
    ]


def by_context(setup: Setup, contexts: Items[int]) -> list[SlowDown]:
    """Return figure 7: one prompt, full or append, beside a smaller batch with longer contexts.

    All sequences of the batch share their context, as in the authors' script; each reads its own
    KV.
    """
    return [
        _slow_down(setup, FIGURE_7_BATCH, context, kind, 1)
        for context in contexts
        for kind in ("full", "append")
    ]


def by_length(setup: Setup, lengths: Items[int]) -> list[tuple[int, float]]:
    """Return pairs of appended tokens and the slow-down of steps beside one such append, in
    percent."""
    return [
        (tokens, _steps(setup, FIGURE_2_BATCH, CONTEXT_TOKENS, tokens, CONTEXT_TOKENS, 1))
        for tokens in lengths
    ]


_PROMPTS = {"full": FIGURE_2_TOKENS, "append": FIGURE_2_TOKENS, "short append": SHORT_TOKENS}


def _slow_down(setup: Setup, batch: int, context: int, kind: str, count: int) -> SlowDown:
    tokens, cached = _PROMPTS[kind], 0 if kind == "full" else context

    def answers_ms(read_tokens: int, count: int) -> float:
        return _answers_ms(setup, batch, read_tokens, tokens, cached, count)

    once = context // batch  # each sequence's part of a context that is read once
    return SlowDown(
        prompts=count,
        kind=kind,
        context_tokens=context,
        steps=_steps(setup, batch, context, tokens, cached, count),
        answers=100 * (answers_ms(context, count) / answers_ms(context, 0) - 1),
        shared=100 * (answers_ms(once if cached else context, count) / answers_ms(once, 0) - 1),
    )


def _steps(setup: Setup, batch: int, context: int, tokens: int, cached: int, count: int) -> float:
    """Return the slow-down of steps while a prompt is computed, in percent."""
    clock = Clock()
    ended_ms: list[float] = []

    def prompt_done(sequence: GpuSequence) -> bool:
        ended_ms.append(clock.now_ms)
        return False

    gpu = SimGpu(clock, StepCosts(setup), prompt_done, lambda sequence: None)
    gpu.chunk_tokens = setup.mixed_chunk_tokens
    for i in range(batch):
        gpu.add_answer(GpuSequence(i, context, context, LONG_ANSWER_TOKENS))
    while gpu.batch < batch:
        clock.step()
    for i in range(count):
        gpu.add_prompt(GpuSequence(-i, cached + tokens, cached, 1))
    under_way = gpu.steps
    while gpu.steps == under_way:  # the step in which they arrived
        clock.step()
    began_ms, first_step = clock.now_ms, gpu.steps
    alone_ms = StepCosts(setup).step_ms(decoding=batch, context_tokens=gpu.context_tokens)
    while len(ended_ms) < count:
        clock.step()
    mean_ms = (ended_ms[-1] - began_ms) / (gpu.steps - first_step)
    return 100 * (mean_ms / alone_ms - 1)


def _answers_ms(
    setup: Setup, batch: int, context: int, tokens: int, cached: int, count: int
) -> float:
    """Return the mean time per token of a batch of short answers that begin together with the
    prompts."""
    clock = Clock()
    ended_ms: list[float] = []

    def answer_done(sequence: GpuSequence) -> None:
        if sequence in members:
            ended_ms.append(clock.now_ms)

    gpu = SimGpu(clock, StepCosts(setup), lambda sequence: True, answer_done)
    gpu.chunk_tokens = setup.mixed_chunk_tokens
    members = [GpuSequence(i, context, context, ANSWER_TOKENS) for i in range(batch)]
    for sequence in members:
        gpu.add_answer(sequence)
    for i in range(count):
        gpu.add_prompt(GpuSequence(-i, cached + tokens, cached, ANSWER_TOKENS))
    while len(ended_ms) < batch:
        clock.step()
    return sum(ended_ms) / batch / ANSWER_TOKENS

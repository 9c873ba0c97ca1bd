"""A simulated GPU with measured times: prompts run in parallel, answers in steps of the batch.

It replaces the roofline of `infra/simulator/machine/gpu.py`, behind the same calls. Up to
`prompts_max` prompts of one worker run at once and do not slow each other; the others start in
order of arrival.
"""

from typing import TYPE_CHECKING, Any

from infra.replay.simulation.speeds import MeasuredSpeeds
from infra.simulator.machine.gpu import GpuSequence, SimGpu

if TYPE_CHECKING:
    from infra.simulator.log.clock import Alarm


class MeasuredGpu(SimGpu):
    """One engine's prompts and answers on virtual time."""

    def __init__(self, speeds: MeasuredSpeeds, *gpu_args: Any) -> None:
        super().__init__(*gpu_args)
        self._speeds = speeds
        self._computing: dict[GpuSequence, Alarm] = {}
        self._answers: dict[GpuSequence, int] = {}  # by sequence: tokens that remain
        self._fresh: list[GpuSequence] = []  # no first token yet

    @property
    def queued_tokens(self) -> int:
        """Return the prompt tokens that remain to be computed."""
        waiting = (*self.prompts, *self._computing)
        return sum(sequence.prompt_tokens - sequence.computed for sequence in waiting)

    def add_prompt(self, sequence: GpuSequence) -> None:
        """Compute the prompt; its owner then decides whether to decode."""
        self.prompts.append(sequence)
        self._compute()

    def add_answer(self, sequence: GpuSequence) -> None:
        """Decode a sequence that has all its KV; it takes part in the next step that ends."""
        sequence.computed = sequence.prompt_tokens
        self._fresh.append(sequence)
        self._enter(sequence)

    def remove(self, sequence: GpuSequence) -> None:
        """Remove a sequence; no more callbacks are made for it."""
        if sequence.removed:
            return
        sequence.removed = True
        if sequence in self._computing:
            self._computing.pop(sequence).cancel()
            self._compute()
        elif sequence in self.prompts:
            self.prompts.remove(sequence)
        self._answers.pop(sequence, None)
        self.batch = len(self._answers)

    def stop(self) -> None:
        """Remove everything, for a worker that dies."""
        super().stop()
        for alarm in self._computing.values():
            alarm.cancel()
        self._computing.clear()
        self._answers.clear()
        self._fresh.clear()

    def _compute(self) -> None:
        speeds = self._speeds
        while self.prompts and len(self._computing) < speeds.prompts_max:
            sequence = self.prompts.popleft()
            line = speeds.append if sequence.computed else speeds.prompt
            took_ms = line.at(sequence.prompt_tokens - sequence.computed)
            self._computing[sequence] = self.clock.after(
                took_ms * self.slow * self.slow_prefill,
                lambda sequence=sequence: self._computed(sequence),  # type: ignore[misc]  # bound now
            )

    def _computed(self, sequence: GpuSequence) -> None:
        del self._computing[sequence]
        sequence.computed = sequence.prompt_tokens
        if self._prompt_done(sequence):
            sequence.output_tokens -= 1
            self._enter(sequence)
        else:
            sequence.removed = True
        self._step_done()
        self._compute()

    def _enter(self, sequence: GpuSequence) -> None:
        sequence.joined, sequence.first_step = True, self.steps
        self._answers[sequence] = max(1, sequence.output_tokens)
        self.batch = len(self._answers)
        if self._alarm is None:
            self._plan()

    def _plan(self) -> None:
        """Schedule the next step, if there is anything to decode."""
        self._alarm = None
        if self._answers:
            beside_ms = self._speeds.beside * len(self._computing)
            self.step_ms = self.slow * (self._speeds.step.at(self.batch) + beside_ms)
            self._alarm = self.clock.after(self.step_ms, self._end_step)

    def _end_step(self) -> None:
        self.steps += 1
        fresh, self._fresh = self._fresh, []
        for sequence in self._answers:
            self._answers[sequence] -= 1
        ended_sequences = [
            sequence for sequence, tokens_left in self._answers.items() if not tokens_left
        ]
        for sequence in fresh:
            if not sequence.removed and sequence not in ended_sequences:
                self._on_first_token(sequence)
        for sequence in ended_sequences:
            del self._answers[sequence]
            sequence.removed = True
        self.batch = len(self._answers)
        for sequence in ended_sequences:
            self._answer_done(sequence)
        self._step_done()
        self._plan()

"""One simulated GPU: a running batch and a queue of prompts, advanced many steps at a time.

Theory of operation. Between changes of the batch every step adds one token to every sequence, so a
run of n steps takes n * (fixed + kv * S) + kv * B * n * (n - 1) / 2 for B sequences with S tokens
of context. This is solved instead of stepped. A sequence that arrives during a run waits for the
end of the current step. While prompts wait, steps are taken one by one: the oldest prompts fill the
tokens of a step that the running batch leaves. A completed prompt has its first token; then it
joins the batch or leaves, as its owner decides. The owner manages the memory.
"""

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import ceil, sqrt

from infra.simulator.log.clock import Alarm, Clock
from infra.simulator.machine.latency import StepCosts

_CHUNK_MIN = 16  # least prompt tokens in a step, for any batch


class GpuSequence:
    """One prompt and its answer on one engine; `owner` is the engine's state of it."""

    __slots__ = (
        "computed",
        "context",
        "done_step",
        "first_step",
        "joined",
        "output_tokens",
        "owner",
        "prompt_tokens",
        "removed",
    )

    def __init__(self, owner: object, prompt_tokens: int, cached: int, output_tokens: int) -> None:
        self.owner = owner
        self.prompt_tokens = prompt_tokens
        self.computed = cached  # prompt tokens whose KV is here
        self.output_tokens = output_tokens  # tokens that remain
        self.context = 0  # tokens of context when it joined the batch
        self.joined = False
        self.first_step = 0
        self.done_step = 0
        self.removed = False


def _nothing(*_: GpuSequence) -> None:
    pass


class SimGpu:
    """A GPU that calls its owner back at virtual times, `step_done` once after the others.

    `prompt_done` returns whether to decode; `on_first_token`: a sequence that came with its KV has
    sampled its first token; `answer_done`: an answer is complete.
    """

    def __init__(
        self,
        clock: Clock,
        costs: StepCosts,
        prompt_done: Callable[[GpuSequence], bool],
        answer_done: Callable[[GpuSequence], None],
        on_first_token: Callable[[GpuSequence], None] = _nothing,
        step_done: Callable[[], None] = _nothing,
    ) -> None:
        self.clock = clock
        self.costs = costs
        self.chunk_tokens = 0
        self.steps_max = 0  # most steps of a run, so that tokens stream; 0: no limit
        self.send_ms = 0.0  # delay of a step by a connector, per prompt that it completes
        self.slow_prefill = 1.0  # a fault: factor on the time of prompts
        self.slow = 1.0  # a fault: factor on all times
        self.batch = 0
        self.context_tokens = 0
        self.steps = 0
        self.step_ms = 0.0  # mean step of the present or last run
        self.prompts: deque[GpuSequence] = deque()
        self._prompt_done = prompt_done
        self._answer_done = answer_done
        self._on_first_token = on_first_token
        self._step_done = step_done
        self._by_end: list[tuple[int, int, GpuSequence]] = []
        self._seq = 0
        self._leaving: list[GpuSequence] = []
        self._joining: list[GpuSequence] = []
        self._chunks: list[tuple[GpuSequence, int]] = []
        self._began_ms = 0.0
        self._planned = 0  # steps of the current run
        self._alarm: Alarm | None = None

    @property
    def queued_tokens(self) -> int:
        """Return the prompt tokens that remain to be computed."""
        return sum(sequence.prompt_tokens - sequence.computed for sequence in self.prompts)

    def add_prompt(self, sequence: GpuSequence) -> None:
        """Compute the prompt; its owner then decides whether to decode."""
        self.prompts.append(sequence)
        self._interrupt()

    def add_answer(self, sequence: GpuSequence) -> None:
        """Decode a sequence that has all its KV; it joins at the next step."""
        sequence.computed = sequence.prompt_tokens
        self._joining.append(sequence)
        self._interrupt()

    def remove(self, sequence: GpuSequence) -> None:
        """Remove a sequence at the end of the step; no more callbacks are made for it."""
        if sequence.removed:
            return
        sequence.removed = True
        if sequence.joined:
            self._leaving.append(sequence)
        elif sequence in self.prompts:
            self.prompts.remove(sequence)
        self._interrupt()

    def stop(self) -> None:
        """Remove everything, for a worker that dies."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        self.prompts.clear()
        self._by_end, self._leaving, self._joining, self._chunks = [], [], [], []
        self.batch = self.context_tokens = self._planned = 0

    def _run_ms(self, steps: int) -> float:
        """Return the time of `steps` steps of the batch without prompts."""
        costs, n = self.costs, steps
        each_ms = costs.fixed_ms(self.batch) + costs.kv_ms * self.context_tokens
        return self.slow * (n * each_ms + costs.kv_ms * self.batch * n * (n - 1) / 2)

    def _steps_in(self, passed_ms: float) -> int:
        """Return the steps of a run that is interrupted after a time: the inverse, rounded up."""
        costs = self.costs
        grow_ms = costs.kv_ms * self.batch / 2
        each_ms = costs.fixed_ms(self.batch) + costs.kv_ms * self.context_tokens - grow_ms
        passed_ms /= self.slow
        root = sqrt(each_ms * each_ms + 4 * grow_ms * passed_ms)
        return max(1, ceil(2 * passed_ms / (each_ms + root) - 1e-9))

    def _interrupt(self) -> None:
        """End the run with its current step as something changed, or begin one."""
        if self._alarm is None:
            self._plan()
        elif self._planned > 1:
            self._alarm.cancel()
            self._planned = min(self._planned, self._steps_in(self.clock.now_ms - self._began_ms))
            at_ms = self._began_ms + self._run_ms(self._planned)
            self._alarm = self.clock.at(at_ms, self._end_run)

    def _plan(self) -> None:
        """Choose the next run: one mixed step, or steps until the first answer is complete."""
        self._began_ms = self.clock.now_ms
        fresh = self._change_batch()
        while self._by_end and self._by_end[0][2].removed:
            heappop(self._by_end)
        if self.prompts:
            self._planned, took_ms = 1, self._mixed_ms()
        elif self.batch:
            self._planned = self._by_end[0][0] - self.steps
            if self.steps_max:
                self._planned = min(self._planned, self.steps_max)
            took_ms = self._run_ms(self._planned)
        else:
            self._alarm = None
            return
        self.step_ms = took_ms / self._planned
        if fresh:
            first_ms = self._began_ms + (took_ms if self._planned == 1 else self._run_ms(1))
            self.clock.at(first_ms, lambda: self._begin(fresh))
        self._alarm = self.clock.after(took_ms, self._end_run)

    def _begin(self, fresh: list[GpuSequence]) -> None:
        for sequence in fresh:
            if not sequence.removed:
                self._on_first_token(sequence)
        self._step_done()

    def _change_batch(self) -> list[GpuSequence]:
        """Between two steps, drop removed sequences and add those that came with their KV."""
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            self._leave(sequence)
        joining, self._joining = self._joining, []
        fresh = [sequence for sequence in joining if not sequence.removed]
        for sequence in fresh:
            self._join(sequence)
        return fresh

    def _mixed_ms(self) -> float:
        chunk_tokens_max = max(_CHUNK_MIN, self.chunk_tokens - self.batch)
        chunk, pairs, completed = 0, 0.0, 0
        for sequence in self.prompts:
            missing_tokens = sequence.prompt_tokens - sequence.computed
            count = min(chunk_tokens_max - chunk, missing_tokens)
            completed += count == missing_tokens
            self._chunks.append((sequence, count))
            chunk += count
            pairs += count * (sequence.computed + count / 2)
            if chunk >= chunk_tokens_max:
                break
        alone_ms = self._run_ms(1) if self.batch else 0.0
        mixed_ms = self.slow * self.costs.step_ms(
            decoding=self.batch,
            context_tokens=self.context_tokens,
            chunk_tokens=chunk,
            pairs=pairs,
        )
        sending_ms = self.send_ms * completed
        return alone_ms + (mixed_ms - alone_ms) * self.slow_prefill + sending_ms

    def _end_run(self) -> None:
        """Count the steps, settle completed and joining sequences, and plan again."""
        self.steps += self._planned
        self.context_tokens += self.batch * self._planned
        self._planned = 1  # what the owner adds in callbacks is planned below
        completed_sequences = []
        while self._by_end and self._by_end[0][0] <= self.steps:
            sequence = heappop(self._by_end)[2]
            if not sequence.removed:
                sequence.removed = True
                self._leave(sequence)
                completed_sequences.append(sequence)
        chunks, self._chunks = self._chunks, []
        for sequence in completed_sequences:
            self._answer_done(sequence)
        for sequence, count in chunks:
            self._settle(sequence, count)
        self._step_done()
        if len(self._by_end) > 2 * self.batch + 64:
            self._by_end = [entry for entry in self._by_end if not entry[2].removed]
            heapify(self._by_end)
        self._plan()

    def _settle(self, sequence: GpuSequence, count: int) -> None:
        if sequence.removed:
            return
        sequence.computed += count
        if sequence.computed < sequence.prompt_tokens:
            return
        self.prompts.remove(sequence)
        if self._prompt_done(sequence):
            sequence.output_tokens -= 1
            self._join(sequence)
        else:
            sequence.removed = True

    def _join(self, sequence: GpuSequence) -> None:
        sequence.joined = True
        sequence.first_step = self.steps
        sequence.context = sequence.prompt_tokens + 1
        sequence.done_step = self.steps + max(1, sequence.output_tokens)
        self.batch += 1
        self.context_tokens += sequence.context
        self._seq += 1
        heappush(self._by_end, (sequence.done_step, self._seq, sequence))

    def _leave(self, sequence: GpuSequence) -> None:
        self.batch -= 1
        self.context_tokens -= sequence.context + self.steps - sequence.first_step

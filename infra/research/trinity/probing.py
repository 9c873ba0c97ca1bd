"""Decoding with probes: a simulated GPU whose sequences pause for search results.

Theory of operation. A probe has a place: every `every` tokens of an answer. It is sent `lookahead`
tokens before its place, and decoding continues meanwhile. At the place the sequence leaves the
batch and waits for the result, for at most `stall_ms`; then it continues without. New passages are
inserted: their tokens are computed beside the batch, as an append-prefill, and decoding continues
after them. A sequence is in the batch from one such event to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

from infra.planning.pools import ProbeSettings
from infra.simulator.log.clock import Clock
from infra.simulator.machine.computation import Computation
from infra.simulator.machine.gpu import GpuSequence, SimGpu
from infra.simulator.machine.latency import StepCosts

_DRAWS = 1 << 16


@dataclass(slots=True)
class ProbeFigures:
    """Counts and times of the probes of one run."""

    probes: int = 0
    latencies_ms: list[float] = field(default_factory=list)  # from the request to the result
    stalled_ms: float = 0.0
    unmet: int = 0  # places at which decoding continued without a result
    decoding_ms: float = 0.0  # of all sequences together

    @property
    def stalled_share(self) -> float:
        return self.stalled_ms / self.decoding_ms if self.decoding_ms else 0.0


@dataclass(slots=True, eq=False)
class _ProbeState:
    """Progress of one sequence from probe to probe."""

    tokens_left: int  # tokens of the answer that remain
    to_next: int  # tokens until the next event
    is_asked: bool = False
    is_here: bool = False
    waits_since: float | None = None
    number: int = 0
    began_ms: float = 0.0


AskProbe = Callable[[str, Callable[[], None]], None]  # worker id, result's callback


class ProbingGpu(SimGpu):
    """A GPU that probes; it calls its owner back as `SimGpu` does."""

    def __init__(
        self,
        clock: Clock,
        costs: StepCosts,
        prompt_done: Callable[[GpuSequence], bool],
        answer_done: Callable[[GpuSequence], None],
        began: Callable[[GpuSequence], None],
        step_done: Callable[[], None],
        *,
        name: str,
        probing: ProbeSettings,
        ask: AskProbe,
        figures: ProbeFigures,
    ) -> None:
        super().__init__(clock, costs, self._computed, self._boundary, self._began_here, step_done)
        self.probing, self.figures = probing, figures
        self._name, self._ask_for = name, ask
        self._owners_prompt_done, self._owners_answer_done = prompt_done, answer_done
        self._owners_began = began
        self._probe_states: dict[GpuSequence, _ProbeState] = {}

    def _began_here(self, sequence: GpuSequence) -> None:
        if sequence in self._probe_states and not self._probe_states[sequence].number:
            self._owners_began(sequence)

    def _computed(self, sequence: GpuSequence) -> bool:
        state = self._probe_states.get(sequence)
        if state is None:
            return self._owners_prompt_done(sequence)
        state.tokens_left -= 1  # inserted tokens are computed, and the next token is sampled
        state.to_next -= 1
        return True

    def _join(self, sequence: GpuSequence) -> None:
        state = self._probe_states.get(sequence)
        if state is None:
            state = self._probe_states[sequence] = _ProbeState(
                sequence.output_tokens, self._first_gap()
            )
            state.began_ms = self.clock.now_ms
        sequence.output_tokens = max(1, min(state.tokens_left, state.to_next))
        super()._join(sequence)

    def _first_gap(self) -> int:
        return max(1, self.probing.every - self._lookahead)

    @property
    def _lookahead(self) -> int:
        return min(self.probing.lookahead, self.probing.every - 1)

    def _boundary(self, sequence: GpuSequence) -> None:
        """Handle a sequence that has left the batch at its next event."""
        state = self._probe_states[sequence]
        state.tokens_left -= sequence.output_tokens
        state.to_next -= sequence.output_tokens
        if state.tokens_left <= 0:
            del self._probe_states[sequence]
            self.figures.decoding_ms += self.clock.now_ms - state.began_ms
            self._owners_answer_done(sequence)
            return
        sequence.removed = sequence.joined = False
        sequence.prompt_tokens += sequence.output_tokens
        sequence.computed = sequence.prompt_tokens
        if not state.is_asked and state.tokens_left <= self._lookahead + 1:
            state.to_next = state.tokens_left  # no token would come after its place
        elif not state.is_asked:
            self._ask(sequence, state)
        if state.to_next > 0:
            self._join(sequence)
        elif state.is_here:
            self._resume(sequence, state, has_result=True)
        else:
            self._wait(sequence, state)

    def _ask(self, sequence: GpuSequence, state: _ProbeState) -> None:
        state.is_asked, state.is_here = True, False
        state.to_next, state.number = self._lookahead, state.number + 1
        asked_ms, number = self.clock.now_ms, state.number
        self.figures.probes += 1

        def deliver() -> None:
            self.figures.latencies_ms.append(self.clock.now_ms - asked_ms)
            if state.number == number:
                state.is_here = True
                self._end_wait(sequence, state, has_result=True)

        self._ask_for(self._name, deliver)

    def _wait(self, sequence: GpuSequence, state: _ProbeState) -> None:
        state.waits_since, number = self.clock.now_ms, state.number

        def time_out() -> None:
            if state.number == number:
                self._end_wait(sequence, state, has_result=False)

        self.clock.after(self.probing.stall_ms, time_out)

    def _end_wait(self, sequence: GpuSequence, state: _ProbeState, *, has_result: bool) -> None:
        if state.waits_since is None:
            return
        self.figures.stalled_ms += self.clock.now_ms - state.waits_since
        self.figures.unmet += not has_result
        state.waits_since = None
        if not sequence.removed:
            self._resume(sequence, state, has_result=has_result)
            self._interrupt()

    def _resume(self, sequence: GpuSequence, state: _ProbeState, *, has_result: bool) -> None:
        """Continue decoding after the probe's result, or without one."""
        state.is_asked, state.to_next = False, self._first_gap()
        if has_result and self._is_new(sequence, state):
            sequence.prompt_tokens += self.probing.new_tokens
            self.prompts.append(sequence)
        else:
            self._joining.append(sequence)

    def _is_new(self, sequence: GpuSequence, state: _ProbeState) -> bool:
        assert isinstance(sequence.owner, Computation)
        hash_value = crc32(f"{sequence.owner.request_id} {state.number}".encode()) % _DRAWS
        return hash_value < self.probing.new_share * _DRAWS

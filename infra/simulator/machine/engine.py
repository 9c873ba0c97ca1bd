"""A simulated engine behind the workers' protocol: it models times and KV.

Runs prefill, decode and replica jobs on one GPU with one KV memory. Outputs are drained instead of
awaited: `wake` is called when time has brought outputs; a caller that adds or aborts a job drains
afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from infra.simulator.log.clock import Clock
from infra.simulator.machine import gpu as gpus
from infra.simulator.machine.computation import Computation
from infra.simulator.machine.gpu import SimGpu
from infra.simulator.machine.kv_exchange import SimKvExchange
from infra.simulator.machine.latency import Setup, StepCosts
from infra.simulator.machine.state import EngineState
from infra.simulator.models import Served
from schemas.errors import PromptTooLong
from schemas.records import Capability
from workers.llm.engine import EngineLoad, Job, Output

HANDLE_MS = 30_000  # how long KV is kept for a decode engine to read
Hashes = Callable[[Job], list[int]]  # block hashes of a job's prompt and answer


class TimedEngine:
    """One engine process, on virtual time."""

    def __init__(
        self,
        engine_id: str,
        clock: Clock,
        setup: Setup,
        exchange: SimKvExchange,
        hashes: Hashes,
        wake: Callable[[], None],
        *,
        prefill_only: bool,
        make_gpu: Callable[..., SimGpu] = SimGpu,  # has SimGpu's parameters
        served: Served = Served(),  # noqa: B008  # never changed
    ) -> None:
        costs = StepCosts(setup)
        self.gpu = gpu = make_gpu(
            clock, costs, self._prompt_done, self._complete, self._on_first_token, self._step_done
        )
        gpu.chunk_tokens = setup.prefill_chunk_tokens if prefill_only else setup.mixed_chunk_tokens
        gpu.send_ms = setup.send_ms if prefill_only else 0.0
        gpu.steps_max = setup.steps_max
        self.state = EngineState(engine_id, setup, gpu, self._start, wake)
        self._clock, self._setup = clock, setup
        self.capability = Capability(
            model=served.model,
            engine="sim",
            engine_id=engine_id,
            block_size=setup.block_tokens,
            max_model_len=setup.kv_blocks * setup.block_tokens,
            running_max=setup.running_max,
            orchestrations=(),  # the worker's registration adds those of its cluster
            kv_bytes_per_token=setup.model.kv_bytes_per_token,
            adapters=served.adapters,
            adapters_max=served.adapters_max,
        )
        self._exchange, self._hashes = exchange, hashes
        self._adapters: dict[str, None] = {}  # loaded ones; the last one was used last
        exchange.engines[engine_id] = self.state

    def add(self, job: Job) -> None:
        """Accept a job, or fail one that is too long."""
        computation = Computation(
            job,
            self._hashes(job),
            len(job.prompt_tokens),
            job.sampling.max_tokens - job.prior_tokens,
            self.capability.model,
        )
        if job.adapter:
            self._load_adapter(job.adapter)
        limit = self.state.cache.blocks_max
        if self.state.blocks_of(computation) <= limit:
            self.state.add(computation)
            return
        error = PromptTooLong(
            f"request {computation.request_id}: expected at most "
            f"{limit * self._setup.block_tokens} tokens with the answer, found "
            f"{computation.prompt_tokens} + {computation.output_tokens}"
        ).to_wire()
        self.state.say(Output(request_id=job.request_id, finish_reason="error", error=error))

    def _load_adapter(self, adapter: str) -> None:
        """Load an adapter, in the place of the one that was used longest ago if all are taken."""
        assert adapter in self.capability.adapters, f"{adapter}: no adapter of this worker"
        self._adapters.pop(adapter, None)
        if len(self._adapters) >= self.capability.adapters_max:
            del self._adapters[next(iter(self._adapters))]
        self._adapters[adapter] = None

    def abort(self, request_id: str) -> None:
        """Stop a job, and free its memory and the KV that is kept for a reader."""
        computation = self.state.computations.get(request_id)
        if computation is not None:
            self.state.drop(computation)
            self.state.say(Output(request_id=request_id, finish_reason="abort"))
        self.state.free(request_id)

    def texts(self, before: Sequence[int], output: Output) -> list[str]:
        """Return the text of each token, one letter."""
        return list(output.text)

    def drain(self) -> list[Output]:
        """Return the outputs since the last call, in order."""
        outputs, self.state.outputs = self.state.outputs, []
        return outputs

    def load(self) -> EngineLoad:
        """Return the current load of the engine."""
        load = self.state.load()
        return replace(load, adapters=tuple(self._adapters)) if self._adapters else load

    def _start(self, computation: Computation) -> None:
        """Start a job that has its memory."""
        job, exchange = computation.job, self._exchange
        if job.is_paired:
            begin = exchange.start_prefill if computation.prefill else exchange.start_decode
            begin(self.state, computation)
        elif job.kv is not None and not computation.prefill:
            exchange.pull(self.state, computation)
        else:
            self.state.compute(computation)

    def _prompt_done(self, sequence: gpus.GpuSequence) -> bool:
        computation, state = sequence.owner, self.state
        assert isinstance(computation, Computation)
        state.name_blocks(computation, computation.prompt_tokens)
        paired = computation.prefill and computation.job.is_paired
        if computation.output_tokens == 1 and not paired:
            self._complete(sequence)
        elif not computation.prefill:
            state.say(computation.say(1))
            return True
        elif paired:
            computation.is_computed = True
            state.say(computation.say(1))
            self._exchange.write_when_ready(state, computation)
        else:
            self._hand_over(computation)
        return False

    def _hand_over(self, computation: Computation) -> None:
        """Keep the KV for the decode engine, for `HANDLE_MS`."""
        state, until_ms = self.state, self._clock.now_ms + HANDLE_MS
        state.leave(computation)
        state.handovers[computation.job_id] = computation
        kv = computation.handle(
            state.engine_id, computation.prompt_tokens, self._setup.block_tokens, int(until_ms)
        )
        state.say(computation.say(1, "handover", kv))

        def expire() -> None:
            state.free(computation.job_id)
            state.wake()

        self._clock.at(until_ms, expire)

    def _on_first_token(self, sequence: gpus.GpuSequence) -> None:
        """Send the first token that a job samples itself after its KV came."""
        computation = sequence.owner
        assert isinstance(computation, Computation)
        if self.state.computations.get(computation.job_id) is computation:
            self.state.say(computation.say(computation.drawn_before + 1))

    def _complete(self, sequence: gpus.GpuSequence) -> None:
        """Send the rest of the answer, and free the job's memory."""
        computation, state = sequence.owner, self.state
        assert isinstance(computation, Computation)
        tokens = computation.output_tokens
        if self._setup.answers_found:
            state.name_blocks(computation, computation.prompt_tokens + tokens - 1)
        state.tokens_total += tokens
        state.say(computation.say(tokens, "length"))
        state.drop(computation)

    def _step_done(self) -> None:
        if self._setup.steps_max:
            self._say_steps()
        if self.state.outputs:
            self.state.wake()

    def _say_steps(self) -> None:
        """Send the tokens that the batch has sampled so far."""
        for computation in self.state.computations.values():
            sequence = computation.sequence
            if sequence is not None and sequence.joined:
                drawn_tokens = computation.drawn_before + self.gpu.steps - sequence.first_step
                if drawn_tokens > max(computation.sent_tokens, computation.drawn_before):
                    self.state.say(computation.say(drawn_tokens))

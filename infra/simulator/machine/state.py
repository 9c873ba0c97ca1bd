"""The state of a simulated engine: its jobs, their memory and GPU, and outputs to be drained.

Prompts start in order of arrival as slots and memory allow. `engine.py` decides what happens when a
job starts, or a prompt or answer is complete; `kv_exchange.py` moves KV between two engines.
"""

from collections import deque
from collections.abc import Callable

from infra.simulator.machine.block_cache import BlockCache
from infra.simulator.machine.computation import Computation
from infra.simulator.machine.gpu import GpuSequence, SimGpu
from infra.simulator.machine.latency import Setup
from schemas.records import WorkPhase
from workers.llm.engine import EngineLoad, Output


class EngineState:
    """One engine's state; calls `start` for a job that has its memory, and `wake` for news."""

    def __init__(
        self,
        engine_id: str,
        setup: Setup,
        gpu: SimGpu,
        start: Callable[[Computation], None],
        wake: Callable[[], None],
    ) -> None:
        self.engine_id, self.setup, self.gpu, self.wake = engine_id, setup, gpu, wake
        self.cache = BlockCache(setup.kv_blocks)
        self.computations: dict[str, Computation] = {}  # by job id
        self.handovers: dict[str, Computation] = {}  # by job id: KV that waits for a reader
        self.pending: deque[Computation] = deque()
        self.running = 0  # computations that hold memory
        self.is_dead = False
        self.tokens_total = 0
        self.buffered_bytes = self.buffered_bytes_max = 0
        self.blocks_max = 0  # most blocks pinned at a time
        self.outputs: list[Output] = []  # to be drained
        self._start = start

    def load(self) -> EngineLoad:
        """Return the current load of the engine."""
        waiting_tokens = sum([computation.prompt_tokens for computation in self.pending])
        return EngineLoad(
            running=self.gpu.batch,
            waiting=len(self.computations) - self.gpu.batch,
            queued_tokens=self.gpu.queued_tokens + waiting_tokens,
            step_ms=self.gpu.step_ms,
            kv_blocks_used=self.cache.pinned,
            kv_blocks_total=self.cache.blocks_max,
            tokens_total=self.tokens_total,
        )

    def stop(self) -> None:
        """End the engine with all its jobs, and send no output."""
        self.is_dead = True
        self.gpu.stop()
        self.cache.clear()
        for container in (self.computations, self.handovers, self.pending, self.outputs):
            container.clear()
        self.running = self.buffered_bytes = 0

    def say(self, output: Output) -> None:
        """Queue an output for the worker's next drain."""
        self.outputs.append(output)

    # Memory

    def add(self, computation: Computation) -> None:
        """Add a job, behind all others."""
        self.computations[computation.job_id] = computation
        self.pending.append(computation)
        self.admit()

    def admit(self) -> None:
        """Start waiting jobs, in order, as slots and memory allow."""
        while self.pending and self.running < self.setup.running_max:
            computation = self.pending[0]
            prompt_blocks = computation.prompt_tokens // self.setup.block_tokens
            hashes = computation.hashes[:prompt_blocks]
            pinned = self.cache.hold(hashes, self.blocks_of(computation))
            if pinned is None:
                return
            computation.blocks = pinned
            self.blocks_max = max(self.blocks_max, self.cache.pinned)
            self.pending.popleft()
            self.running += 1
            cached_tokens = len(pinned.hashes) * self.setup.block_tokens
            computation.cached_tokens = min(cached_tokens, computation.prompt_tokens - 1)
            self._start(computation)

    def blocks_of(self, computation: Computation) -> int:
        """Return the blocks that a job fills by its end; a prefill job generates one token."""
        answer = 1 if computation.job.phase is WorkPhase.PREFILL else computation.output_tokens
        return -(-(computation.prompt_tokens + answer) // self.setup.block_tokens)

    def buffer(self, computation: Computation) -> bool:
        """Take room for a job's KV in the receive buffer; return False if it overflows and ends the
        engine."""
        buffer_bytes_max = self.setup.receive_buffer_bytes
        if buffer_bytes_max is None:
            return True
        computation.buffered_bytes = computation.kv_bytes
        self.buffered_bytes += computation.kv_bytes
        self.buffered_bytes_max = max(self.buffered_bytes_max, self.buffered_bytes)
        if self.buffered_bytes <= buffer_bytes_max:
            return True
        self.stop()
        return False

    def name_blocks(self, computation: Computation, tokens: int) -> None:
        """Give the first tokens' blocks their hashes, as their KV is complete and others may use
        it."""
        if computation.blocks is not None:
            blocks = tokens // self.setup.block_tokens
            self.cache.commit(computation.blocks, computation.hashes[:blocks])

    def leave(self, computation: Computation) -> None:
        """End a job; its memory may be kept."""
        del self.computations[computation.job_id]
        if computation.sequence is not None:
            self.gpu.remove(computation.sequence)
        if computation.blocks is None:
            self.pending.remove(computation)

    def drop(self, computation: Computation) -> None:
        """End a job and free its memory, unless a transfer still writes to it."""
        self.leave(computation)
        if not computation.is_incoming:
            self._release(computation)
        self.admit()

    def on_kv_arrival(self, computation: Computation) -> None:
        """Note the end of a transfer into a job's memory, and free it if the job is over."""
        computation.is_incoming = False
        if self.is_dead:
            return
        if self.computations.get(computation.job_id) is not computation:
            self._release(computation)
            self.admit()

    def free(self, job_id: str) -> None:
        """Free the KV that was kept for a reader."""
        computation = self.handovers.pop(job_id, None)
        if computation is not None:
            self._release(computation)
            self.admit()

    def _release(self, computation: Computation) -> None:
        if computation.blocks is not None:
            self.cache.release(computation.blocks)
            computation.blocks = None
            self.running -= 1
            self.buffered_bytes -= computation.buffered_bytes
            computation.buffered_bytes = 0

    # The GPU

    def compute(self, computation: Computation) -> None:
        """Compute the prompt here, after its cached tokens."""
        prompt, cached = computation.prompt_tokens, computation.cached_tokens
        computation.drawn_before = 1
        computation.sequence = GpuSequence(computation, prompt, cached, computation.output_tokens)
        self.gpu.add_prompt(computation.sequence)

    def decode(self, computation: Computation, *, drawn_before: int) -> None:
        """Decode a job whose KV is all here. `drawn_before` tokens of its answer were sampled
        before; its first output repeats them."""
        prompt = computation.prompt_tokens
        self.name_blocks(computation, prompt)
        computation.drawn_before = drawn_before
        tokens = computation.output_tokens - drawn_before
        computation.sequence = GpuSequence(computation, prompt, prompt, tokens)
        self.gpu.add_answer(computation.sequence)

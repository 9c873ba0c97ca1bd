"""A simulated worker: takes work as a real one would, and reports phases and outcomes.

Runs prefill, decode and replica work on one engine, with one KV memory; `infra/simulator/pairs.py`
moves KV between two of them. Prompts start in order of arrival as slots and memory allow. It knows
nothing of routers: records leave through `Ports`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from infra.simulator import pairs
from infra.simulator.blocks import BlockCache
from infra.simulator.clock import Clock
from infra.simulator.engine import Engine, Sequence
from infra.simulator.job import Job
from infra.simulator.latency import Setup, StepCosts
from infra.simulator.links import Links
from infra.simulator.script import Conversation, Turn
from schemas.errors import PromptTooLong
from schemas.records import (
    CancelWork,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Role,
    Work,
)

HANDLE_MS = 30_000  # how long KV is kept for a decode worker that has to come


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where a worker's words go. `said` gives a request's conversation and turn."""

    phase: Callable[[Phase], None]
    outcome: Callable[[Outcome], None]
    token: Callable[[str, int, float, bool], None]  # request, attempt, at_ms, from decode
    changed: Callable[["SimWorker"], None]  # its prefix cache has
    said: Callable[[str], tuple[Conversation, Turn]]


class SimWorker:
    """One life of a worker at a time; `restart` begins the next."""

    def __init__(
        self,
        worker_id: str,
        roles: tuple[Role, ...],
        partition: int,
        clock: Clock,
        setup: Setup,
        links: Links,
        ports: Ports,
        peers: dict[str, "SimWorker"],
    ) -> None:
        self.worker_id, self.roles, self.partition = worker_id, roles, partition
        self.clock, self.setup, self.links = clock, setup, links
        self.ports, self.peers = ports, peers
        self.epoch = 1
        self.alive = True
        self.cache = BlockCache(setup.kv_blocks)
        self.engine = Engine(clock, StepCosts(setup), self._prompt_done, self._answer_done)
        prefill_only = roles == (Role.PREFILL,)
        self.engine.chunk_tokens = (
            setup.prefill_chunk_tokens if prefill_only else setup.mixed_chunk_tokens
        )
        self.engine.prompts_max = (setup.prefill_running_max or None) if prefill_only else None
        self.engine.send_ms = setup.send_ms if prefill_only else 0.0
        self.jobs: dict[str, Job] = {}
        self.handed: dict[str, Job] = {}  # prefill is done, the KV waits for its reader
        self.pending: deque[Job] = deque()
        self.running = 0  # jobs that hold memory
        self.requests_total = self.tokens_total = 0
        self.buffered_bytes = self.buffered_bytes_max = 0
        self.blocks_max = 0  # most that were pinned at a time

    # What arrives

    def take(self, work: Work) -> None:
        """Begin a piece of work; of an earlier life or known already, it is ignored."""
        if not self.alive or work.worker_epoch != self.epoch:
            return
        said, turn = self.ports.said(work.request_id)
        job = Job(work, said, turn.prompt_tokens, turn.output_tokens, self.clock.now_ms)
        if job.key in self.jobs:
            return
        self.jobs[job.key] = job
        self.requests_total += 1
        if self._blocks(job) > self.cache.blocks_max:
            self._fail(job)
            return
        job.alarm = self.clock.at(work.deadline_ms, lambda: self._expire(job))
        self.pending.append(job)
        self.admit()

    def cancel(self, order: CancelWork) -> None:
        """Stop an attempt and free what it holds; void orders are obeyed in silence."""
        if not self.alive:
            return
        key = f"{order.request_id}.{order.attempt}"
        job = self.jobs.get(key)
        if job is not None:
            self.drop(job)
            if job.ends_request and not order.void:
                self.ports.outcome(job.outcome(OutcomeKind.CANCELLED, self.clock.now_ms))
        self.free(key)

    def free(self, key: str) -> None:
        """The KV that was kept for a reader is needed no longer."""
        job = self.handed.pop(key, None)
        if job is not None:
            self._release(job)
            self.admit()

    def restart(self) -> None:
        """Come back with nothing, as a new life."""
        self.epoch += 1
        self.alive = True

    def crash(self) -> None:
        """Die: whatever it held is gone, without a word."""
        self.alive = False
        for job in self.jobs.values():
            if job.alarm is not None:
                job.alarm.cancelled = True
        self.engine.stop()
        self.cache.clear()
        self.jobs.clear()
        self.handed.clear()
        self.pending.clear()
        self.running = self.buffered_bytes = 0

    def buffer(self, job: Job) -> bool:
        """Take room for a job's KV outside the engine; False where that kills this life."""
        room = self.setup.receive_buffer_bytes
        if room is None:
            return True
        job.buffered_bytes = job.kv_bytes
        self.buffered_bytes += job.kv_bytes
        self.buffered_bytes_max = max(self.buffered_bytes_max, self.buffered_bytes)
        if self.buffered_bytes <= room:
            return True
        self.crash()
        return False

    # How work goes on

    def admit(self) -> None:
        """Start waiting work, in order, as slots and memory allow."""
        while self.pending and self.running < self.setup.running_max:
            job = self.pending[0]
            blocks = self._blocks(job)
            hashes = job.said.hashes[: job.prompt_tokens // self.setup.block_tokens]
            job.held = self.cache.hold(hashes, blocks)
            if job.held is None:
                return
            self.blocks_max = max(self.blocks_max, self.cache.pinned)
            self.pending.popleft()
            self.running += 1
            found = len(job.held.hashes) * self.setup.block_tokens
            job.cached_tokens = min(found, job.prompt_tokens - 1)
            self._start(job)

    def _start(self, job: Job) -> None:
        if job.prefill and job.paired:
            pairs.start_prefill(self, job)
        elif job.prefill:
            self.compute(job)
        elif job.paired:
            pairs.start_decode(self, job)
        elif job.work.kv is not None:
            pairs.pull(self, job)
        else:
            self.compute(job)

    def compute(self, job: Job) -> None:
        """Compute the prompt here, from what is cached on."""
        job.sequence = Sequence(job, job.prompt_tokens, job.cached_tokens, job.output_tokens)
        self.engine.add_prompt(job.sequence)

    def decode(self, job: Job, tokens: int) -> None:
        """Decode so many tokens; all KV is here."""
        self.name_blocks(job, job.prompt_tokens)
        job.sequence = Sequence(job, job.prompt_tokens, job.prompt_tokens, tokens)
        self.engine.add_answer(job.sequence)

    def name_blocks(self, job: Job, tokens: int) -> None:
        """KV of the first tokens is complete: others may use it."""
        if job.held is not None:
            self.cache.commit(job.held, job.said.hashes[: tokens // self.setup.block_tokens])
            self.ports.changed(self)

    def _prompt_done(self, sequence: Sequence) -> bool:
        job = sequence.owner
        assert isinstance(job, Job)
        job.first_ms = self.clock.now_ms
        self.name_blocks(job, job.prompt_tokens)
        work = job.work
        self.ports.token(work.request_id, work.attempt, job.first_ms, not job.prefill)
        if job.output_tokens == 1 and job.ends_request:
            self._complete(job)
            return False
        if not job.prefill:
            return True
        if job.paired:
            job.computed = True
            pairs.write_when_ready(self, job)
        else:
            self._hand_over(job)
        return False

    def _hand_over(self, job: Job) -> None:
        """Keep the KV for whoever decodes, for a while."""
        self._leave(job)
        self.handed[job.key] = job
        until_ms = self.clock.now_ms + HANDLE_MS
        kv = job.handle(job.prompt_tokens, self.setup.block_tokens, int(until_ms))
        self.ports.phase(job.phase(PhaseKind.PREFILL_DONE, self.clock.now_ms, kv=kv, sent_tokens=1))
        self.clock.at(until_ms, lambda: self.free(job.key))

    def _answer_done(self, sequence: Sequence) -> None:
        job = sequence.owner
        assert isinstance(job, Job)
        first_ms = sequence.first_ms
        if first_ms:  # it came with its KV
            self.ports.token(job.work.request_id, job.work.attempt, first_ms, True)
            job.first_ms = job.work.first_token_ms or first_ms
        self._complete(job)

    def _complete(self, job: Job) -> None:
        if self.setup.answers_found:
            self.name_blocks(job, job.prompt_tokens + job.output_tokens - 1)
        self.tokens_total += job.output_tokens
        self.ports.outcome(job.outcome(OutcomeKind.COMPLETED, self.clock.now_ms))
        self.drop(job)

    # How work ends

    def _expire(self, job: Job) -> None:
        if self.jobs.get(job.key) is not job:
            return
        self.drop(job)
        if job.ends_request:
            self.ports.outcome(job.outcome(OutcomeKind.EXPIRED, self.clock.now_ms))

    def _fail(self, job: Job) -> None:
        del self.jobs[job.key]
        tokens = self.cache.blocks_max * self.setup.block_tokens
        error = PromptTooLong(
            f"request {job.work.request_id}: expected at most {tokens} tokens with the answer, "
            f"found {job.prompt_tokens} + {job.output_tokens}"
        ).to_wire()
        self.ports.phase(job.phase(PhaseKind.FAILED, self.clock.now_ms, error=error))

    def drop(self, job: Job) -> None:
        """Forget a job and free all that it holds."""
        self._leave(job)
        self._release(job)
        self.admit()

    def _leave(self, job: Job) -> None:
        del self.jobs[job.key]
        if job.alarm is not None:
            job.alarm.cancelled = True
        if job.sequence is not None:
            self.engine.remove(job.sequence)
        if job.held is None:
            self.pending.remove(job)

    def _release(self, job: Job) -> None:
        if job.held is not None:
            self.cache.release(job.held)
            job.held = None
            self.running -= 1
            self.buffered_bytes -= job.buffered_bytes
            job.buffered_bytes = 0

    def _blocks(self, job: Job) -> int:
        """What it will have filled at its end; a prefill worker makes one token."""
        tokens = job.prompt_tokens + (1 if job.prefill else job.output_tokens)
        return -(-tokens // self.setup.block_tokens)

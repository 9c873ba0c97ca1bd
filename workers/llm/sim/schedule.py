"""The timing of the simulated engine: queues, prefills, steps, polls and deadlines.

There is a timer for each prefill, one for the batch's steps, and one that polls transfers and
deadlines. Each is set from the time at which the last one was due, so times do not drift. A
transfer never delays the batch. Outputs go to `emit`; `engine.py` checks jobs.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from schemas.errors import DeadlineExceeded
from schemas.records import Orchestration, WireError, WorkPhase
from streams.log.clock import wall_ms
from workers.deadlines import Deadlines
from workers.llm.engine import EngineLoad, Output
from workers.llm.sim.adapters import SimAdapters
from workers.llm.sim.answers import RunningAnswers
from workers.llm.sim.arena import KvArena
from workers.llm.sim.blocks import BlockManager
from workers.llm.sim.exchange import KvExchange
from workers.llm.sim.run import SimRun, Stage
from workers.llm.sim.settings import SimSettings

_POLL_MOVING_S, _POLL_HOLDING_S, _POLL_IDLE_S = 0.001, 0.002, 0.05
_STEP_WEIGHT = 0.1  # weight of the latest step in the measured step time
_LATE_S = 0.1  # steps later than this are not made up for


class Schedule:
    """All jobs of the engine; it works in callbacks of the event loop."""

    def __init__(
        self,
        settings: SimSettings,
        blocks: BlockManager,
        arena: KvArena,
        exchange: KvExchange,
        adapters: SimAdapters,
        answers: RunningAnswers,
        *,
        emit: Callable[[list[Output]], None],
        die: Callable[[Exception], None],
        is_backed_up: Callable[[], bool],
    ) -> None:
        self.runs: dict[str, SimRun] = {}
        self.load = EngineLoad(
            kv_blocks_total=settings.kv_blocks, step_ms=settings.step_s(1, 0) * 1_000
        )
        self._settings, self._blocks, self._arena = settings, blocks, arena
        self._exchange, self._adapters, self._answers = exchange, adapters, answers
        self._emit, self._die, self._is_backed_up = emit, die, is_backed_up
        self._loop = asyncio.get_running_loop()
        self._to_fetch: deque[SimRun] = deque()
        self._to_prefill: deque[SimRun] = deque()
        self._transferring = 0  # runs that fetch, await or write KV
        self._prefilling = 0  # runs that prefill, or read their prefix
        self._deadlines = Deadlines[SimRun](lambda run: run.stage is not Stage.ENDED)
        self._recomputed_total = 0
        self._prefill_tokens, self._prefill_mark_s = 0, self._loop.time()
        self._step_timer: asyncio.TimerHandle | None = None
        self._step_from_s = self._step_at_s = 0.0
        self._poll_timer = self._loop.call_later(_POLL_IDLE_S, self._fatal, self._poll)

    @property
    def waiting(self) -> int:
        """Return the number of jobs that wait for a fetch or a prefill."""
        return len(self._to_fetch) + len(self._to_prefill)

    @property
    def active(self) -> int:
        """Return the number of places in the batch that are taken: by running, computed or
        transferred jobs."""
        return len(self._answers) + self._prefilling + self._transferring

    def take(self, run: SimRun) -> None:
        """Queue a checked job, and start jobs that fit."""
        self.runs[run.request_id] = run
        self._deadlines.add(run.job.deadline_ms, run)
        if run.is_paired_prefill:
            self._exchange.pushes.take(run)
        is_fetch = run.job.phase is WorkPhase.DECODE and run.job.kv is not None
        (self._to_fetch if is_fetch else self._to_prefill).append(run)
        self._admit(self._loop.time())

    def abort(self, run: SimRun) -> None:
        """Remove a job, in any stage."""
        self._drop(run)
        self._emit([Output(request_id=run.request_id, finish_reason="abort")])
        self._admit(self._loop.time())

    def current_load(self) -> EngineLoad:
        """Return the engine's current load figures."""
        load = replace(
            self.load,
            running=self.active,
            waiting=self.waiting,
            queued_tokens=sum(run.prompt_tokens for run in self._to_prefill),
            kv_blocks_used=self._blocks.used,
            adapters=self._adapters.names(self._loop.time()),
            extra={
                "recomputed_total": self._recomputed_total,
                "evictions_total": self._blocks.evictions_total,
            },
        )
        return self._exchange.add_transfers(load)

    def close(self) -> None:
        """Stop all timers; the jobs' blocks are freed with the engine."""
        self._poll_timer.cancel()
        if self._step_timer is not None:
            self._step_timer.cancel()
        for run in self.runs.values():
            if run.timer is not None:
                run.timer.cancel()

    def _fatal(self, callback: Callable[..., None], *args: Any) -> None:
        """Run a callback; a bug in it ends the engine, where the event loop would only log it."""
        try:
            callback(*args)
        except Exception as error:
            self.close()
            self._die(error)

    def _admit(self, now_s: float) -> None:
        """Start jobs that fit; transfers and prefills do not wait for each other."""
        settings, pushes = self._settings, self._exchange.pushes
        while pushes.has_ready and self.active < settings.running_max:
            pushes.write_next(time.monotonic(), wall_ms()).stage = Stage.WRITING
            self._transferring += 1
            self._poll_soon()
        while self._to_fetch and self.active < settings.running_max:
            if not self._fetch(self._to_fetch[0]):
                break
            self._to_fetch.popleft()
            self._transferring += 1
            self._poll_soon()
        while (
            self._to_prefill
            and self.active < settings.running_max
            and self._prefilling < settings.prefill_running_max
        ):
            if not self._prefill(self._to_prefill[0], now_s):
                break
            self._to_prefill.popleft()

    def _fetch(self, run: SimRun) -> bool:
        """Open the run's blocks and request its KV; return False if there is no room."""
        exchange = self._exchange
        self._adapters.loaded_s(run.job.adapter, self._loop.time())  # while the KV moves
        if not run.job.is_paired:
            if not exchange.begin(run, time.monotonic(), wall_ms()):
                return False
            run.stage = Stage.FETCHING
            return True
        if len(exchange.allocations) >= max(1, self._settings.running_max - 1):
            return False  # one place stays free for prefills, as two engines may await each other
        target = exchange.allocations.begin(run, wall_ms())
        if target is None:
            return False
        run.stage = Stage.AWAITING
        if run.job.orchestration is Orchestration.DECODE_FIRST:
            self._emit(
                [Output(request_id=run.request_id, kv=target, cached_tokens=run.cached_tokens)]
            )
        return True

    def _prefill(self, run: SimRun, now_s: float) -> bool:
        size = self._settings.block_size
        reusable = run.digest.chain[
            : (run.prompt_tokens - 1) // size
        ]  # one token is always computed
        table = self._blocks.open(reusable, run.digest.blocks, run.blocks_max(size), run.salt)
        if table is None:
            return False
        run.table, run.cached_tokens = table, table.matched * size
        self._prefilling += 1
        if run.is_paired_prefill:
            self._poll_soon()
            if self._exchange.pushes.read(run, time.monotonic(), wall_ms()):
                run.stage = Stage.READING
                return True
        self._compute(run, now_s)
        return True

    def _compute(self, run: SimRun, now_s: float) -> None:
        run.stage = Stage.PREFILLING
        begins_at_s = self._adapters.loaded_s(run.job.adapter, now_s)
        ends_at_s = begins_at_s + self._settings.prefill_s(run.prompt_tokens, run.cached_tokens)
        run.timer = self._loop.call_at(ends_at_s, self._fatal, self._finish_prefill, run, ends_at_s)

    def _finish_prefill(self, run: SimRun, at_s: float) -> None:
        self._prefilling -= 1
        first = run.cached_tokens // self._settings.block_size
        blocks = run.table.blocks[first : run.digest.blocks]
        self._arena.write(blocks, run.digest.values(first))
        self._count_prefill(run.prompt_tokens - run.cached_tokens, at_s)
        self._begin(run, at_s)
        self._admit(at_s)

    def _begin(self, run: SimRun, at_s: float) -> None:
        """Sample the first token from the prompt's KV; then the batch continues, or the peer."""
        for block, value in zip(run.table.blocks, run.digest.chain, strict=False):
            self._blocks.remember(block, value, run.salt)
        was_idle = not len(self._answers)
        output = self._answers.begin(run)
        self.load.tokens_total += 1
        if run.is_paired_prefill:
            if not output.finish_reason:
                self._answers.leave(run)
            run.stage = Stage.HOLDING
            self._exchange.pushes.on_computed(run, wall_ms())
            output = replace(output, finish_reason="", stop_reason="")
        elif output.finish_reason:
            self._end(run)
        elif run.job.phase is WorkPhase.PREFILL:
            self._answers.leave(run)
            run.stage = Stage.ENDED
            del self.runs[run.request_id]
            kv = self._exchange.hold(run, wall_ms())
            output = replace(output, finish_reason="handover", kv=kv)
            self._poll_soon()
        else:
            run.stage = Stage.RUNNING
            if was_idle and self._step_timer is None:
                self._plan_step(at_s)
        self._emit([output])

    def _begin_received(self, run: SimRun, now_s: float) -> None:
        """Begin a run that has received its KV, as soon as its adapter is loaded."""
        at_s = self._adapters.loaded_s(run.job.adapter, now_s)
        if at_s <= now_s:
            self._begin(run, now_s)
            return
        self._prefilling += 1
        run.stage = Stage.PREFILLING
        run.timer = self._loop.call_at(at_s, self._fatal, self._finish_load, run, at_s)

    def _finish_load(self, run: SimRun, at_s: float) -> None:
        self._prefilling -= 1
        self._begin(run, at_s)
        self._admit(at_s)

    def _plan_step(self, from_s: float) -> None:
        duration_s = self._settings.step_s(len(self._answers), self._prefilling)
        self._step_from_s, self._step_at_s = from_s, from_s + duration_s
        self._step_timer = self._loop.call_at(self._step_at_s, self._fatal, self._step)

    def _step(self) -> None:
        now_s, at_s = self._loop.time(), self._step_at_s
        self._step_timer = None
        self.load.step_ms += _STEP_WEIGHT * (
            (now_s - self._step_from_s) * 1_000 - self.load.step_ms
        )
        if len(self._answers) and not self._is_backed_up():
            outputs, finished_runs = self._answers.step()
            self.load.tokens_total += len(outputs)
            for run in finished_runs:
                self._end(run)
            self._emit(outputs)
            if finished_runs:
                self._admit(at_s)
        if len(self._answers):
            self._plan_step(at_s if now_s - at_s < _LATE_S else now_s)

    def _poll(self) -> None:
        now_s, now_ms = self._loop.time(), wall_ms()
        for run, error in self._exchange.poll(time.monotonic(), now_ms):
            if run.stage is not Stage.ENDED:
                self._on_kv_end(run, error, now_s)
        for run in self._deadlines.pop_expired(now_ms):
            late_ms = now_ms - run.job.deadline_ms
            late = DeadlineExceeded(f"{run.request_id}: {late_ms} ms past its deadline")
            self._drop(run)
            self._emit([Output.failed(run.request_id, late)])
        self._admit(now_s)
        self._poll_timer.cancel()
        delay_s = _POLL_HOLDING_S if self._exchange.is_busy else _POLL_IDLE_S
        delay_s = _POLL_MOVING_S if self._exchange.is_urgent else delay_s
        self._poll_timer = self._loop.call_later(delay_s, self._fatal, self._poll)

    def _on_kv_end(self, run: SimRun, error: WireError | None, now_s: float) -> None:
        """Continue a run whose KV has moved, or will not move."""
        if error is not None and run.job.is_paired:
            self._drop(run, error)
            self._emit([Output(request_id=run.request_id, finish_reason="error", error=error)])
        elif run.stage is Stage.READING:
            self._compute(run, now_s)
        elif run.stage is Stage.WRITING:
            self._transferring -= 1
            self._exchange.pushes.finish(run)
            self._end(run)
            self._emit([_handover(run)])
        elif error is None:
            self._transferring -= 1
            self._begin_received(run, now_s)
        else:
            self._transferring -= 1
            self._recomputed_total += 1
            run.stage, run.kv_missed = Stage.WAITING, error
            self._to_prefill.appendleft(run)

    def _poll_soon(self) -> None:
        """Poll soon, and often from then on."""
        if self._poll_timer.when() > self._loop.time() + _POLL_HOLDING_S:
            self._poll_timer.cancel()
            self._poll_timer = self._loop.call_later(_POLL_MOVING_S, self._fatal, self._poll)

    def _drop(self, run: SimRun, error: WireError | None = None) -> None:
        """Remove a run, in any stage; send the error to its peer, if it has one."""
        match run.stage:
            case Stage.WAITING:
                (self._to_prefill if run in self._to_prefill else self._to_fetch).remove(run)
            case Stage.FETCHING | Stage.AWAITING | Stage.WRITING:
                self._transferring -= 1
            case Stage.READING:
                self._prefilling -= 1
            case Stage.PREFILLING:
                self._prefilling -= 1
                assert run.timer is not None
                run.timer.cancel()
            case Stage.RUNNING:
                self._answers.leave(run)
        self._exchange.abandon(run, error)
        self._end(run)

    def _end(self, run: SimRun) -> None:
        if not run.table.closed:
            self._blocks.close(run.table)
        run.stage = Stage.ENDED
        del self.runs[run.request_id]

    def _count_prefill(self, tokens: int, at_s: float) -> None:
        elapsed_s = at_s - self._prefill_mark_s
        self._prefill_tokens += tokens
        if elapsed_s >= 1.0:
            self.load.prefill_tokens_per_s = self._prefill_tokens / elapsed_s
            self._prefill_mark_s, self._prefill_tokens = at_s, 0


def _handover(run: SimRun) -> Output:
    """Return the last output of a prefill whose KV was written to its peer."""
    return Output(
        request_id=run.request_id,
        finish_reason="handover",
        cached_tokens=run.cached_tokens,
        kv_bytes=run.kv_bytes,
        transfer_ms=run.transfer_ms,
    )

"""The vLLM engine behind the Engine protocol: AsyncLLM in this process, KV by its NixlConnector.

One task per request reads what vLLM generates for it; outputs gather in a mailbox. What is checked
before vLLM sees it stands in `vllm_check.py`, what counts as a hang in `vllm_runs.py`, the two ends
of a hand-over in `vllm_handover.py` and `vllm_receive.py`, the calls into vLLM in `vllm_api.py`,
its processes in `vllm_launch.py` and `vllm_plugin.py`.

Hand-over, pull only: prefill generates one token and keeps its blocks for `kv_lease_s`; decode
reads them. A handle that must not be used, or a read that fails, or one that ended too late to be
trusted, leads to computing the prompt in place; the figures in `load().extra` count these.
`cached_tokens` is what this engine had in its own cache, so a prompt that was received in full
has 0: the producer reports its own.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

from schemas.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineFailed,
    InvalidRequest,
    KvUnavailable,
    NoProgress,
    TriviumError,
)
from schemas.log.clock import wall_ms
from schemas.records import Capability, Orchestration, Role, WorkPhase
from schemas.settings import ModelSettings
from workers.llm.engine import EngineLoad, Job, Output
from workers.llm.vllm_check import HandleGate, job_problem
from workers.llm.vllm_handover import Handover, Releases, certain_text
from workers.llm.vllm_receive import PREFILL_PARAMS, Receiver
from workers.llm.vllm_runs import Mailbox, Run, Runs
from workers.llm.vllm_settings import VllmSettings

_WATCH_S = 0.25
_LATE_S = 1.0  # the event loop was held up: what the watch sees is then not the engine's silence
_CANCEL_S = 1.0
log = logging.getLogger(__name__)


async def start(
    settings: VllmSettings,
    *,
    model: ModelSettings,
    role_set: Collection[Role],
    engine_id: str,
    worker_id: str,
    worker_epoch: int,
) -> "VllmEngine":
    """An engine that is ready to serve. A start takes 20 s and more, off the event loop."""
    has_transfer = settings.kv_transfer != "off" and bool({Role.PREFILL, Role.DECODE} & {*role_set})

    def launch() -> tuple[ModuleType, ModuleType, Any]:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
        launcher = import_module("workers.llm.vllm_launch")
        launched = launcher.launch(settings, model, engine_id=engine_id, has_transfer=has_transfer)
        return launcher, import_module("workers.llm.vllm_api"), launched

    starting = asyncio.get_running_loop().run_in_executor(None, launch)
    try:
        launcher, api, launched = await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_end_unwanted)
        raise
    capability = Capability(
        model=model.served_name,
        engine="vllm",
        engine_id=engine_id,
        block_size=launched.block_size,
        max_model_len=launched.max_model_len,
        running_max=settings.running_max,
        kv_layout=launched.kv_layout,
        orchestrations=(Orchestration.PREFILL_FIRST,) if has_transfer else (),
    )
    handover = Handover(settings, capability, worker_id=worker_id, worker_epoch=worker_epoch)
    return VllmEngine(settings, capability, handover, launcher, api, launched)


def _end_unwanted(starting: "asyncio.Future[Any]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        launcher, _, launched = starting.result()
        launcher.end(launched, 0.0)


class VllmEngine:
    """Made by `start`."""

    def __init__(
        self,
        settings: VllmSettings,
        capability: Capability,
        handover: Handover,
        launcher: ModuleType,
        api: ModuleType,
        launched: Any,
    ) -> None:
        self.capability = capability
        self._settings, self._handover = settings, handover
        self._launcher, self._api, self._launched = launcher, api, launched
        self._llm, self._meter = launched.llm, launched.meter
        gate = HandleGate(engine_id=capability.engine_id, block_size=capability.block_size)
        self._receiver = Receiver(gate, launched.meter, has_transfer=launched.has_transfer)
        self._releases = Releases(launched.llm)
        self._runs = Runs(
            running_max=settings.running_max,
            first_token_timeout_s=settings.first_token_timeout_ms / 1_000,
            progress_timeout_s=settings.progress_timeout_ms / 1_000,
        )
        self._mail, self._arrived = Mailbox(), asyncio.Event()
        self._dead: EngineDead | None = None
        self._counts: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch())

    def add(self, job: Job) -> None:
        if job.request_id in self._runs.active:  # delivered twice; the one that runs will answer
            log.warning("request %s: already here", job.request_id)
            return
        launched = self._launched
        error = self._dead or job_problem(
            job, max_model_len=launched.max_model_len, vocab_size=launched.vocab_size
        )
        room = launched.max_model_len - len(job.prompt_tokens)
        max_tokens = min(job.sampling.max_tokens, room)
        hands_over = job.phase is WorkPhase.PREFILL and max_tokens > 1
        if hands_over and not launched.has_transfer and error is None:
            error = KvUnavailable(f"{job.request_id}: this engine has no KV transfer")
        if error is not None:
            self._put(
                Output(request_id=job.request_id, finish_reason="error", error=error.to_wire())
            )
            return
        now_s = time.monotonic()
        run = Run(job, 1 if hands_over else max_tokens, hands_over, clock_s=now_s)
        run.kv_params = PREFILL_PARAMS if hands_over else self._receiver.params(job, wall_ms())
        self._runs.add(run, now_s)
        left_s = max(0.0, (job.deadline_ms - wall_ms()) / 1_000)
        run.deadline = self._loop.call_later(left_s, self._expire, run)
        run.task = self._loop.create_task(self._serve(run))

    async def outputs(self) -> list[Output]:
        while not self._mail:
            if self._dead is not None:
                raise self._dead
            self._arrived.clear()
            await self._arrived.wait()
        return self._mail.take()

    def abort(self, request_id: str) -> None:
        run = self._runs.active.get(request_id)
        if run is not None:
            self._end(run, Output(request_id=request_id, finish_reason="abort"))
        self._releases.begin(self._handover.taken_back(request_id))

    def saw_worker(self, worker_id: str, epoch: int, engine_id: str) -> None:
        """The fleet knows this worker in this epoch; KV of an earlier one is refused."""
        self._receiver.gate.saw(worker_id, epoch)

    def load(self) -> EngineLoad:
        figures, runs = self._meter.figures, self._runs
        running = sum(run.begun for run in runs)
        is_idle = not runs.active and not self._handover.held(wall_ms(), figures.kv_usage)
        usage = 0.0 if is_idle else figures.kv_usage
        counts = self._receiver.counts
        return EngineLoad(
            running=running,
            waiting=len(runs.active) - running,
            queued_tokens=sum(len(run.job.prompt_tokens) for run in runs if not run.begun),
            prefill_tokens_per_s=figures.prefill_tokens_per_s,
            step_ms=figures.step_ms,
            kv_blocks_used=round(usage * self._launched.kv_blocks),
            kv_blocks_total=self._launched.kv_blocks,
            kv_bytes_received=figures.kv_bytes_received,
            tokens_total=self._counts["tokens"],
            extra={
                "kv_handles_held": self._handover.held(wall_ms(), figures.kv_usage),
                "kv_handles_total": self._handover.total,
                "kv_refused_total": counts["refused"],
                "kv_recomputed_total": counts["recomputed"],
                "kv_late_total": counts["late"],
                "kv_transfers_total": figures.kv_transfers,
                "kv_failures_total": figures.kv_failures,
                "kv_expired_total": figures.kv_expired,
                "stalled_total": self._counts["stalled"],
                "reported_age_s": time.monotonic() - figures.reported_s,
            },
        )

    async def close(self) -> None:
        if self._llm is None:
            return
        self._dead = self._dead or EngineDead(f"{self.capability.engine_id}: the engine was closed")
        self._watching.cancel()
        tasks = [run.task for run in self._runs if run.task is not None]
        for run in self._runs:
            self._forget(run)
        for task in tasks:
            task.cancel()
        self._releases.cancel()
        handler, self._llm = self._llm.output_handler, None
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S)
        if handler is not None:
            handler.cancel()  # before the processes end, so that it does not report their end
        self._arrived.set()
        end, timeout_s = self._launcher.end, self._settings.shutdown_timeout_s
        await asyncio.to_thread(end, self._launched, timeout_s)
        self._launcher.forget(self._launched)

    async def _serve(self, run: Run) -> None:
        name = run.job.request_id
        error: TriviumError | None = None
        try:
            while await self._generate(run) == "again":
                run.kv_params = None
        except self._api.EngineDeadError as dead:
            self._die(dead)
        except (self._api.VLLMClientError, ValueError, TypeError) as invalid:
            error = InvalidRequest(f"{name}: {invalid}")
        except Exception as failure:
            log.exception("request %s: vLLM failed", name)
            error = EngineFailed(f"{name}: {failure!r}")
        if error is not None and self._runs.holds(run):
            self._fail(run, error)

    async def _generate(self, run: Run) -> str:
        """Run the job once. "again": its KV must not be trusted, and nothing was said yet."""
        job, api = run.job, self._api
        params = api.sampling_params(
            job.sampling, max_tokens=run.max_tokens, kv_params=run.kv_params
        )
        prompt = api.tokens_input(list(job.prompt_tokens))
        async with aclosing(self._llm.generate(prompt, params, job.request_id)) as stream:
            async for result in stream:
                if not self._runs.holds(run):
                    return "ended"
                reason = result.outputs[0].finish_reason
                if not run.begun and self._receiver.is_untrusted(run, reason, wall_ms()):
                    return "again"
                self._take(run, result)
        return "ended"

    def _take(self, run: Run, result: Any) -> None:
        job, part, now_s = run.job, result.outputs[0], time.monotonic()
        kv_bytes, transfer_ms = 0, 0.0
        if not run.begun:
            self._runs.begin(run, now_s)
            kv_bytes, transfer_ms = self._receiver.arrival(run, result.num_cached_tokens or 0)
        token_ids = tuple(part.token_ids)
        if token_ids:
            self._runs.token_s = now_s
            self._counts["tokens"] += len(token_ids)
        output = Output(
            request_id=job.request_id,
            token_ids=token_ids,
            text=part.text,
            logprobs=()
            if job.sampling.logprobs is None
            else self._api.token_logprobs(token_ids, part.logprobs, job.sampling.logprobs),
            finish_reason=part.finish_reason or "",
            stop_reason="" if part.stop_reason is None else str(part.stop_reason),
            cached_tokens=run.cached_tokens,
            kv_bytes=kv_bytes,
            transfer_ms=transfer_ms,
        )
        if not part.finish_reason:
            self._put(output)
        else:
            self._end(run, self._last(run, output, result.kv_transfer_params), stop=False)

    def _last(self, run: Run, output: Output, kv_params: dict[str, Any] | None) -> Output:
        """The last output, as the protocol has it."""
        name, reason = run.job.request_id, output.finish_reason
        if run.hands_over and reason == "length":
            if not kv_params:
                error = KvUnavailable(f"{name}: prefill ended without a KV handle")
                return replace(output, finish_reason="error", error=error.to_wire())
            kv = self._handover.handle(name, kv_params, wall_ms())
            text = certain_text(output.text, run.job.sampling)
            return replace(output, finish_reason="handover", text=text, kv=kv)
        if run.hands_over and kv_params:  # the answer is whole; vLLM holds its KV all the same
            self._releases.begin(str(kv_params.get("remote_request_id", "")))
        if reason in ("stop", "length"):
            return output
        failed = EngineFailed(f"{name}: vLLM ended it with {reason!r}")
        return replace(output, finish_reason="error", error=failed.to_wire())

    async def _watch(self) -> None:
        """Notice a dead engine without requests, and stalled requests."""
        while self._dead is None:
            before_s = time.monotonic()
            await asyncio.sleep(_WATCH_S)
            now_s = time.monotonic()
            if self._llm.errored:
                self._die(None)
            if now_s - before_s > _WATCH_S + _LATE_S:
                continue
            figures = self._meter.figures
            for run, why in self._runs.stalled(now_s, figures.reported_s, figures.kv_usage):
                self._counts["stalled"] += 1
                self._fail(run, NoProgress(f"{run.job.request_id}: {why}"))

    def _expire(self, run: Run) -> None:
        if self._runs.holds(run):
            self._fail(run, DeadlineExceeded(f"{run.job.request_id}: its deadline passed"))

    def _fail(self, run: Run, error: TriviumError) -> None:
        name = run.job.request_id
        self._end(run, Output(request_id=name, finish_reason="error", error=error.to_wire()))

    def _end(self, run: Run, output: Output, *, stop: bool = True) -> None:
        """The run's last output; `stop` also ends it in the engine."""
        self._forget(run)
        if stop and run.task is not None and run.task is not asyncio.current_task():
            run.task.cancel()
        self._put(output)

    def _forget(self, run: Run) -> None:
        self._runs.remove(run, time.monotonic())
        self._meter.prefills.pop(run.job.request_id, None)
        if not any(other.kv_params for other in self._runs):
            self._meter.transfers.clear()  # of requests that were aborted before their first token
        if run.deadline is not None:
            run.deadline.cancel()

    def _die(self, cause: BaseException | None) -> None:
        """The engine is gone; the worker must restart."""
        if self._dead is None:
            self._dead = EngineDead(f"{self.capability.engine_id}: vLLM's processes are gone")
            self._dead.__cause__ = cause
            log.error("%s", self._dead.message)
        for run in self._runs:
            self._forget(run)
        self._arrived.set()

    def _put(self, output: Output) -> None:
        self._mail.put(output)
        self._arrived.set()

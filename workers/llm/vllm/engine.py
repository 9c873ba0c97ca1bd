"""The `Engine` protocol on vLLM: AsyncLLM in this process, KV by vLLM's NIXL connectors.

`start.py` creates it. One task per request reads what vLLM generates; outputs collect in a mailbox.
`check.py` decides which jobs vLLM may receive, `runs.py` what counts as a hang. In a hand-over,
`endings.py` is the sending side and `receive.py` the receiving side. `api.py` has the calls into
vLLM, `launch.py` and `plugin.py` its processes.

Theory of operation of the hand-over. Pull: prefill generates one token and keeps its blocks for
`kv_lease_s`; decode reads them. With `keep_decoded_kv_ms` decode keeps its blocks too, and the
prefill of the next turn reads the history from there. Push: prefill writes. The two jobs may arrive
in either order, and vLLM matches them by their equal request ids. With `decode_first` the prefill
job has the blocks that it will write to, and first reads the prefix that decode has. A decode
engine that gives up does not reuse its blocks until no write can arrive. An engine computes the
prompt itself if a handle must not be used, if all tries of a read have failed or it ended too late
to be trusted, and if a write does not arrive; the figures in `load().extra` count these cases.
`cached_tokens` of a decode engine counts its own cache: 0 for a prompt that was received in full,
because the producer reports its own.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from schemas.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineFailed,
    InvalidRequest,
    KvUnavailable,
    NoProgress,
    TriviumError,
    UnknownModel,
)
from schemas.records import WorkPhase
from streams.log.clock import wall_ms
from workers.kv.block_log import BlockLog
from workers.llm.engine import EngineLoad, Job, Output, PeerMetadata
from workers.llm.pieces import repeated_chars, texts_of
from workers.llm.vllm.check import HandleGate, job_problem, rest_of
from workers.llm.vllm.continued.stops import ContinuedStops
from workers.llm.vllm.endings import KvEndings
from workers.llm.vllm.handover import Handover, Releases
from workers.llm.vllm.lora.loaded_adapters import LoadedAdapters
from workers.llm.vllm.receive import Receiver
from workers.llm.vllm.runs import ActiveRuns, Mailbox, VllmRun
from workers.llm.vllm.settings import VllmSettings
from workers.llm.vllm.writes import Writes

_WATCH_S = 0.25
_LATE_S = 1.0  # a watch that is later was delayed by the event loop, not by the engine
_CANCEL_S = 1.0
_SHUTDOWN_S: Final = 5  # within the time of a worker for closing its engine; then they are killed
log = logging.getLogger(__name__)


class VllmEngine:
    """An engine on vLLM's AsyncLLM; `close` ends its processes."""

    def __init__(
        self,
        settings: VllmSettings,
        handover: Handover,
        launcher: ModuleType,
        api: ModuleType,
        launched: Any,
    ) -> None:
        self.capability = capability = launched.capability
        self._settings, self._handover = settings, handover
        self._launcher, self._api, self._launched = launcher, api, launched
        self._llm, self._meter = launched.llm, launched.meter
        size, mode = capability.block_size, settings.kv_transfer
        self.block_log = BlockLog(size, launched.kv_blocks)
        self._events: Any = None
        self._adapters = LoadedAdapters(self._llm, api.lora_requests(launched.adapters))
        self._receiver = Receiver(
            HandleGate(engine_id=capability.engine_id, block_size=size, mode=mode),
            launched.meter,
            mode=mode,
            keeps=settings.keep_decoded_kv_ms > 0,
            block_bytes=size * capability.kv_bytes_per_token,
        )
        self._releases = Releases(launched.llm)
        self._writes = Writes(launched.llm, launched.meter, handover, self._releases, self._put)
        self._endings = KvEndings(settings, handover, self._receiver, self._releases, self._writes)
        self._runs = ActiveRuns(
            running_max=settings.running_max,
            first_token_timeout_s=2 * settings.progress_timeout_ms / 1_000,
            progress_timeout_s=settings.progress_timeout_ms / 1_000,
            adapters_max=capability.adapters_max,
        )
        self._mail, self._arrived = Mailbox(), asyncio.Event()
        self._dead: EngineDead | None = None
        self._counts: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._meter.allocated = self._allocated
        self._watching = self._loop.create_task(self._watch())

    async def prepare(self) -> None:
        """Load the adapters, and start to fill `block_log` from vLLM's KV events; close the engine
        if that fails.
        """
        endpoint, module = self._launched.events_endpoint, "workers.llm.vllm.events"
        try:
            await self._adapters.load_all()
            if endpoint:
                self._events = await import_module(module).subscribe(
                    endpoint, self.block_log, self._launched.kv_blocks
                )
        except BaseException:
            await self.close()
            raise

    def add(self, job: Job) -> None:
        name, whole, job = job.request_id, job, rest_of(job)
        end = None if whole.continues_stops else whole.early_end(self._launched.end_ids)
        if name in self._runs.active or name in self._writes:  # added twice; the first answers
            log.warning("request %s: already here", name)
            return
        if end is not None:
            self._put(end)
            return
        max_tokens = min(
            job.sampling.max_tokens, self.capability.max_model_len - len(job.prompt_tokens)
        )
        now_s, now_ms = time.monotonic(), wall_ms()
        hands_over = job.phase is WorkPhase.PREFILL and max_tokens > 1
        run = VllmRun(job, 1 if hands_over else max_tokens, hands_over, now_s)
        error = self._problem(run, now_ms)
        if error is not None:
            self._put(Output.failed(name, error))
            return
        if job.prior_tokens:
            run.repeated_chars = repeated_chars(self._decoder(job), job.prompt_tokens)
        if whole.continues_stops:
            run.stops = ContinuedStops.of(whole, self._decoder(job))
            end = whole.early_end(self._launched.end_ids, run.stops.stops)
            if end is not None:
                self._put(end)
                return
        self._receiver.prepare(run, now_ms)
        self._runs.add(run, now_s)
        left_s = max(0.0, (job.deadline_ms - now_ms) / 1_000)
        run.deadline = self._loop.call_later(left_s, self._expire, run)
        run.task = self._loop.create_task(self._serve(run))

    def _problem(self, run: VllmRun, now_ms: int) -> TriviumError | None:
        job, orchestrations = run.job, self.capability.orchestrations
        error = self._dead or job_problem(
            job, max_model_len=self.capability.max_model_len, vocab_size=self._launched.vocab_size
        )
        if error is None and job.adapter and job.adapter not in self.capability.adapters:
            error = UnknownModel(f"{job.request_id}: no adapter {job.adapter} on this engine")
        if error is not None:
            return error
        if run.hands_over and not self._launched.has_transfer:
            return KvUnavailable(f"{job.request_id}: this engine has no KV transfer")
        if job.is_paired and job.orchestration not in orchestrations:
            expected = " or ".join(orchestrations) or "none"
            orchestration = job.orchestration.value
            return KvUnavailable(f"{job.request_id}: expected {expected}, found {orchestration}")
        if run.hands_over and job.kv_target is not None:
            try:
                self._receiver.gate.check_target(job, now_ms)
            except TriviumError as refused:
                return refused
        return None

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
        self._writes.abort(request_id)
        self._releases.begin(self._handover.take_back(request_id))

    def texts(self, before: Sequence[int], output: Output) -> list[str]:
        decode = self._llm.get_tokenizer().decode
        return texts_of(lambda ids: decode(ids, skip_special_tokens=True), before, output)

    def _decoder(self, job: Job) -> Callable[[list[int]], str]:
        decode, skip = self._llm.get_tokenizer().decode, job.sampling.skip_special_tokens
        return lambda ids: str(
            decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        )

    def set_peer_metadata(self, peer_metadata: PeerMetadata) -> None:
        """Set how to find a peer engine's `Capability.nixl_metadata`."""
        self._receiver.peer_metadata = peer_metadata

    def observe_worker(self, worker_id: str, epoch: int, engine_id: str) -> None:
        """Note a worker's latest epoch; KV of earlier ones is refused."""
        self._receiver.gate.observe_epoch(worker_id, epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Note that the own worker lost its lease and joined again; its jobs were aborted."""
        self._handover.begin_epoch(epoch)

    def load(self) -> EngineLoad:
        figures, runs = self._meter.figures, self._runs
        running = sum(run.has_begun for run in runs)
        handle_count = self._handover.count_handles(wall_ms(), figures.kv_usage)
        is_idle = not (
            runs.active or handle_count or self._writes.paired_count or self._releases.quarantined
        )
        usage = 0.0 if is_idle else figures.kv_usage
        counts = self._receiver.counts
        return EngineLoad(
            running=running + self._writes.paired_count,
            waiting=len(runs.active) - running,
            queued_tokens=sum(len(run.job.prompt_tokens) for run in runs if not run.has_begun),
            prefill_tokens_per_s=figures.prefill_tokens_per_s,
            step_ms=figures.step_ms,
            kv_blocks_used=round(usage * self._launched.kv_blocks),
            kv_blocks_total=self._launched.kv_blocks,
            kv_bytes_sent=figures.kv_bytes_sent,
            kv_bytes_received=figures.kv_bytes_received + counts["written_bytes"],
            kv_handles_held=handle_count,
            tokens_total=self._counts["tokens"],
            adapters=self._adapters.names,
            extra={
                "kv_handles_total": self._handover.total,
                "kv_refused_total": counts["refused"],
                "kv_recomputed_total": counts["recomputed"],
                "kv_late_total": counts["late"],
                "kv_quarantined": self._releases.quarantined,
                "kv_transfers_total": figures.kv_transfers,
                "kv_descriptors_total": figures.kv_descriptors,
                "kv_retries_total": figures.kv_retries,
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
        self._writes.cancel()
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
        await asyncio.to_thread(self._launcher.end, self._launched, _SHUTDOWN_S)
        self._launcher.forget(self._launched)
        if self._events is not None:
            await self._events.close()

    async def _serve(self, run: VllmRun) -> None:
        name = run.job.request_id
        error: TriviumError | None = None
        try:
            while await self._generate(run) == "again":
                self._endings.quarantine(run)
                self._receiver.compute(run)
        except self._api.EngineDeadError as dead:
            self._die(dead)
        except EngineFailed as failed:  # to load its adapter
            error = failed
        except (self._api.VLLMClientError, ValueError, TypeError) as invalid:
            error = InvalidRequest(f"{name}: {invalid}")
        except Exception as failure:
            log.exception("request %s: vLLM failed", name)
            error = EngineFailed(f"{name}: {failure!r}")
        if error is not None and self._runs.holds(run):
            self._fail(run, error)

    async def _generate(self, run: VllmRun) -> str:
        """Run the job once; return "again" if its KV did not arrive and no token was sampled."""
        job, api = run.job, self._api
        params = api.sampling_params(
            job.sampling,
            max_tokens=run.max_tokens,
            kv_params=run.kv_params,
            prior_tokens=job.prior_tokens,
            stops=run.stops is None,
        )
        prompt = api.tokens_input(list(job.prompt_tokens), cache_salt=job.cache_scope or None)
        arguments = api.reasoning_arguments(job)
        arguments["lora_request"] = await self._adapters.request_for(job.adapter)
        if not self._runs.holds(run):
            return "ended"
        wait_s = max(0.0, (run.awaited_ms - wall_ms()) / 1_000) if run.awaited_ms else None
        try:
            async with asyncio.timeout(wait_s) as limit:
                async with aclosing(
                    self._llm.generate(prompt, params, job.request_id, **arguments)
                ) as stream:
                    async for result in stream:
                        limit.reschedule(None)
                        if not self._runs.holds(run):
                            return "ended"
                        self._take(run, result)
        except TimeoutError:
            if not limit.expired():
                raise
            self._receiver.note_late(run)
            return "again"
        return "ended"

    def _take(self, run: VllmRun, result: Any) -> None:
        job, part, now_s = run.job, result.outputs[0], time.monotonic()
        kv_bytes, transfer_ms, missed = 0, 0.0, None
        if not run.has_begun:
            self._runs.begin(run, now_s)
            kv_bytes, transfer_ms = self._receiver.arrival(run, result.num_cached_tokens or 0)
            if run.missed is not None and job.phase is WorkPhase.DECODE:
                missed = run.missed.to_wire()
        token_ids = tuple(part.token_ids)
        if token_ids:
            run.has_sampled = True
            self._runs.token_s = now_s
            self._counts["tokens"] += len(token_ids)
            if self._settings.keep_decoded_kv_ms:
                run.tokens += token_ids
        output = Output(
            request_id=job.request_id,
            token_ids=token_ids,
            text=run.new_text(part.text),
            logprobs=()
            if job.sampling.logprobs is None
            else self._api.token_logprobs(token_ids, part.logprobs, job.sampling.logprobs),
            finish_reason=part.finish_reason or "",
            stop_reason="" if part.stop_reason is None else str(part.stop_reason),
            cached_tokens=run.cached_tokens,
            kv_bytes=kv_bytes,
            transfer_ms=transfer_ms,
            kv_missed=missed,
        )
        if run.stops is not None:
            output = run.stops.cut(output)
        if not output.finish_reason:
            self._put(output)
        else:
            last = self._endings.output(run, output, result.kv_transfer_params)
            self._end(run, last, stop=False)

    def _allocated(self, name: str, blocks: Sequence[int], tokens: int) -> None:
        """Report the blocks of a job that a peer will write to."""
        run = self._runs.active.get(name)
        if run is not None and not run.has_begun and run.awaited_ms:
            target = self._handover.target(run.job, blocks, tokens, run.awaited_ms)
            self._put(Output(request_id=name, kv=target, cached_tokens=tokens))

    async def _watch(self) -> None:
        """Detect a dead engine, also without requests, and stalled requests."""
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

    def _expire(self, run: VllmRun) -> None:
        if self._runs.holds(run):
            self._fail(run, DeadlineExceeded(f"{run.job.request_id}: its deadline passed"))

    def _fail(self, run: VllmRun, error: TriviumError) -> None:
        name = run.job.request_id
        self._end(run, Output.failed(name, error))

    def _end(self, run: VllmRun, output: Output, *, stop: bool = True) -> None:
        """Send the run's last output; with `stop`, also end it in the engine."""
        self._forget(run)
        if stop and run.task is not None and run.task is not asyncio.current_task():
            run.task.cancel()
        self._put(output)

    def _forget(self, run: VllmRun) -> None:
        self._runs.remove(run, time.monotonic())
        self._endings.quarantine(run)
        self._meter.prefills.pop(run.job.request_id, None)
        self._meter.missed.pop(run.job.request_id, None)
        if not any(run.source for run in self._runs):
            self._meter.reads.clear()  # left by requests aborted before their first token
        if run.deadline is not None:
            run.deadline.cancel()

    def _die(self, cause: BaseException | None) -> None:
        """Mark the engine as dead; the worker must restart."""
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

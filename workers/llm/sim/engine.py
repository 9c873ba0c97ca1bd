"""The simulated engine: the `Engine` protocol with the times of a profile and real KV bytes.

It builds the parts, checks jobs, and returns outputs to the worker. `schedule.py` decides when
things happen, `answers.py` which token is next, and `exchange.py` which KV is handed over and
fetched. `workers/config.py` names `start`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from schemas.errors import (
    EngineDead,
    InvalidRequest,
    PromptTooLong,
    TriviumError,
    UnknownModel,
    WorkerRefused,
)
from schemas.model.adapters import loaded_max
from schemas.records import Capability
from schemas.settings import ModelSettings
from streams.log.clock import wall_ms
from workers.kv.block_log import BlockLog
from workers.kv.nixl_transfer import NixlTransfer
from workers.kv.transfer import KvTransfer, MemoryTransfer, NoTransfer
from workers.llm.engine import EngineLoad, Job, Output, PeerMetadata
from workers.llm.pieces import texts_of
from workers.llm.sim.adapters import SimAdapters
from workers.llm.sim.answers import RunningAnswers
from workers.llm.sim.arena import KvArena
from workers.llm.sim.blocks import BlockManager
from workers.llm.sim.exchange import KvExchange
from workers.llm.sim.handles import EngineOwner
from workers.llm.sim.run import SimRun, make_run, start_value
from workers.llm.sim.schedule import Schedule
from workers.llm.sim.settings import KV_HEADS, SimSettings
from workers.llm.sim.vocabulary import Vocabulary, load_vocabulary

_log = logging.getLogger(__name__)
_BYTES_PER_TOKEN = 256  # enough words per block to find wrong bytes; a real model has far more
_BACKLOG_STEPS_MAX = 64  # steps not collected by the worker, before stepping pauses
# The pause before an unreachable peer is tried again; it doubles up to the latter.
_RECONNECT_S, _RECONNECT_MAX_S = 0.05, 5.0


async def start(
    settings: SimSettings,
    *,
    model: ModelSettings,
    engine_id: str,
    worker_id: str,
    worker_epoch: int,
) -> "SimEngine":
    """Start a simulated engine that is ready to serve."""
    vocabulary = await asyncio.to_thread(load_vocabulary, model.path)
    arena = KvArena(
        settings.kv_blocks,
        settings.block_size,
        _BYTES_PER_TOKEN,
        heads=KV_HEADS,
        tensor_parallel=settings.tensor_parallel,
    )
    transfer: KvTransfer = NoTransfer()
    if settings.transfer == "nixl":
        transfer = await asyncio.to_thread(
            NixlTransfer,
            engine_id,
            arena.regions,
            reconnect_s=_RECONNECT_S,
            reconnect_max_s=_RECONNECT_MAX_S,
            devices=settings.kv_devices,
        )
    elif settings.transfer == "memory":
        transfer = MemoryTransfer(engine_id, arena.regions)
    capability = Capability(
        model=model.served_name,
        engine="sim",
        engine_id=engine_id,
        block_size=settings.block_size,
        max_model_len=model.max_model_len,
        running_max=settings.running_max,
        kv_layout=f"sim/{settings.block_size}x{_BYTES_PER_TOKEN}/{KV_HEADS}",
        orchestrations=settings.orchestrations,
        nixl_metadata=transfer.metadata(),
        tensor_parallel=settings.tensor_parallel,
        kv_bytes_per_token=arena.block_bytes // settings.block_size,
        adapters=tuple(model.adapters),
        adapters_max=min(len(model.adapters), model.adapters_max),
    )
    block_log = BlockLog(settings.block_size, settings.kv_blocks)
    blocks = BlockManager(settings.kv_blocks, block_log)
    owner = EngineOwner(worker_id=worker_id, worker_epoch=worker_epoch, engine_id=engine_id)
    exchange = KvExchange(settings, owner, blocks, arena, transfer)
    adapters = SimAdapters(loaded_max(model), settings.adapter_load_ms / 1_000)
    return SimEngine(settings, capability, vocabulary, blocks, block_log, arena, exchange, adapters)


class SimEngine:
    """The simulated engine. It works in callbacks of the event loop and has no task."""

    def __init__(
        self,
        settings: SimSettings,
        capability: Capability,
        vocabulary: Vocabulary,
        blocks: BlockManager,
        block_log: BlockLog,
        arena: KvArena,
        exchange: KvExchange,
        adapters: SimAdapters,
    ) -> None:
        self.capability, self.block_log = capability, block_log
        self.blocks, self.exchange = blocks, exchange
        self._settings, self._vocabulary, self._arena = settings, vocabulary, arena
        self._loop = asyncio.get_running_loop()
        self._ready: deque[list[Output]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._dead: EngineDead | None = None
        self._schedule = Schedule(
            settings,
            blocks,
            arena,
            exchange,
            adapters,
            RunningAnswers(settings, blocks, arena, vocabulary),
            emit=self._emit,
            die=self._die,
            is_backed_up=lambda: len(self._ready) >= _BACKLOG_STEPS_MAX,
        )

    def add(self, job: Job) -> None:
        if job.request_id in self._schedule.runs:  # added twice; the running job will answer
            _log.warning("request %s: already here", job.request_id)
            return
        end = None if job.continues_stops else job.early_end(self._vocabulary.end_ids)
        if end is not None:
            self._emit([end])
            return
        try:
            run = self._make_run(job)
            if run.refuses_prior:
                end = job.refused_prior()
            elif job.continues_stops and run.writer is not None:
                end = job.early_end(self._vocabulary.end_ids, run.writer.stops)
            if end is None and run.has_ended and run.writer is not None:
                text = run.writer.stops.flush()
                end = Output(request_id=job.request_id, text=text, finish_reason="stop")
            if end is not None:
                self._emit([end])
                return
            self._schedule.take(run)
        except TriviumError as error:
            if job.is_paired:
                self.exchange.reject(job, error)
            self._emit([Output.failed(job.request_id, error)])

    async def outputs(self) -> list[Output]:
        while not self._ready:
            if self._dead is not None:
                raise self._dead
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._ready.popleft()

    def abort(self, request_id: str) -> None:
        run = self._schedule.runs.get(request_id)
        if run is None:
            self.exchange.release(request_id)
        else:
            self._schedule.abort(run)

    def texts(self, before: Sequence[int], output: Output) -> list[str]:
        return texts_of(self._vocabulary.text, before, output)

    def load(self) -> EngineLoad:
        return self._schedule.current_load()

    def set_peer_metadata(self, peer_metadata: PeerMetadata) -> None:
        """Set how to find a peer's `Capability.nixl_metadata`. Without it handles contain the
        metadata, a few hundred bytes each.
        """
        self.exchange.set_peer_metadata(peer_metadata)

    def observe_worker(self, worker_id: str, epoch: int, engine_id: str) -> None:
        """Note a worker's latest epoch; KV of earlier ones is refused."""
        self.exchange.observe_worker(worker_id, epoch, engine_id)

    def begin_epoch(self, epoch: int) -> None:
        """Note that the own worker lost its lease and joined again; its jobs were aborted."""
        self.exchange.begin_epoch(epoch)

    async def close(self) -> None:
        if self._dead is None:
            self._dead = EngineDead(f"{self.capability.engine_id}: the engine was closed")
            self._schedule.close()
        self.exchange.close()
        self._wake()

    def _die(self, error: Exception) -> None:
        """Stop the engine after a bug; the worker must restart."""
        self._dead = EngineDead(f"{self.capability.engine_id}: {error!r}")
        self._dead.__cause__ = error
        self._wake()

    def _make_run(self, job: Job) -> SimRun:
        """Return the job's run; raises a TriviumError for a job that is refused."""
        problem = self._problem(job)
        if problem is not None:
            raise problem
        space = self.capability.max_model_len - len(job.prompt_tokens)
        start = start_value(self.capability.model, job.adapter)
        digest = self._arena.digest(job.prompt_tokens, start)
        run = make_run(job, digest, start, self._settings, self._vocabulary, space)
        if run.blocks_max(self._settings.block_size) > self._settings.kv_blocks:
            raise PromptTooLong(
                f"{job.request_id}: expected to fit {self._settings.kv_blocks} blocks"
            )
        refusal = self.exchange.refusal(run, wall_ms())
        if refusal is not None:
            raise refusal
        return run

    def _problem(self, job: Job) -> TriviumError | None:
        longest, sampling = self.capability.max_model_len, job.sampling
        if self._dead is not None:
            return self._dead
        if not job.prompt_tokens:
            return InvalidRequest(f"{job.request_id}: expected a prompt of at least one token")
        if len(job.prompt_tokens) >= longest:
            token_count = len(job.prompt_tokens)
            return PromptTooLong(
                f"{job.request_id}: expected under {longest} tokens, found {token_count}"
            )
        if sampling.max_tokens < 1:
            return InvalidRequest(f"{job.request_id}: expected max_tokens of at least 1")
        if job.adapter and job.adapter not in self.capability.adapters:
            return UnknownModel(f"{job.request_id}: no adapter {job.adapter} on this engine")
        if self._schedule.waiting >= self._settings.waiting_max:
            return WorkerRefused(f"{job.request_id}: {self._settings.waiting_max} jobs are waiting")
        return None

    def _emit(self, outputs: list[Output]) -> None:
        self._ready.append(outputs)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

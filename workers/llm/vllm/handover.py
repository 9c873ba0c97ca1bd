"""KV that vLLM keeps for a peer: its handles, and how many of them may still be read.

A prefilled prompt waits for the decode engine that continues it, a decoded conversation for the
prefill engine of its next turn. vLLM does not report when a peer has read. It is only certain that
a lease ends, and that an engine whose KV memory is all free keeps no KV. Time is an argument. Used
by `engine.py`.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.records import Capability, KvHandle
from workers.llm.engine import Job
from workers.llm.vllm.check import add_mark
from workers.llm.vllm.settings import VllmSettings

_TRIES, _PAUSE_S = 5, 0.05
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PinnedKv:
    """KV of one prompt or conversation that is kept for a peer."""

    engine_request_id: str
    lease_ends_ms: int


class Handover:
    """Makes and counts the KV handles of one engine."""

    def __init__(
        self, settings: VllmSettings, capability: Capability, *, worker_id: str, worker_epoch: int
    ) -> None:
        self._settings, self._capability = settings, capability
        self._worker_id, self._worker_epoch = worker_id, worker_epoch
        self._pins: dict[str, PinnedKv] = {}
        self.total = 0

    def handle(
        self,
        request_id: str,
        params: dict[str, Any],
        prompt: Sequence[int],
        now_ms: int,
        adapter: str = "",
    ) -> KvHandle:
        """Return the handle for vLLM's parameters of a finished prefill of this prompt."""
        lease_ms = self._settings.kv_lease_s * 1_000
        return self._make_handle(request_id, add_mark(params, prompt, adapter), now_ms, lease_ms)

    def answer_handle(
        self,
        request_id: str,
        params: dict[str, Any],
        tokens: Sequence[int],
        now_ms: int,
        adapter: str = "",
    ) -> KvHandle | None:
        """Return the handle for a finished answer; `tokens` are the prompt's and its own.

        Return None if the KV's token count does not match `tokens` and the blocks.
        """
        count, block_size = params["remote_num_tokens"], self._capability.block_size
        blocks = len(params["remote_block_ids"][0])
        if not 0 < count <= len(tokens) or blocks != -(-count // block_size):
            return None
        marked_params = add_mark(params, tokens[:count], adapter)
        return self._make_handle(
            request_id, marked_params, now_ms, self._settings.keep_decoded_kv_ms
        )

    def target(
        self, job: Job, block_ids: Sequence[int], tokens: int, expires_at_ms: int
    ) -> KvHandle:
        """Return the handle for a job's blocks that a prefill engine will fill; the first `tokens`
        tokens are valid.
        """
        return KvHandle(
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            engine_id=self._capability.engine_id,
            engine_request_id=job.request_id,
            tokens=tokens,
            block_size=self._capability.block_size,
            block_ids=tuple(block_ids),
            expires_at_ms=expires_at_ms,
            params=json.dumps(add_mark({}, job.prompt_tokens[:tokens], job.adapter)).encode(),
        )

    def _make_handle(
        self, request_id: str, params: dict[str, Any], now_ms: int, lease_ms: int
    ) -> KvHandle:
        lease_ends_ms = now_ms + lease_ms
        engine_request_id = str(params["remote_request_id"])
        self._prune(now_ms)
        self._pins[request_id] = PinnedKv(engine_request_id, lease_ends_ms)
        self.total += 1
        return KvHandle(
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            engine_id=self._capability.engine_id,
            engine_request_id=engine_request_id,
            tokens=params["remote_num_tokens"],
            block_size=self._capability.block_size,
            block_ids=tuple(params["remote_block_ids"][0]),
            expires_at_ms=lease_ends_ms - self._settings.handle_margin_ms,
            params=json.dumps(params).encode(),
        )

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of new handles."""
        self._worker_epoch = epoch

    def take_back(self, request_id: str) -> str:
        """Stop counting a request's handle; return its id in the engine, "" if there is none."""
        pin = self._pins.pop(request_id, None)
        return pin.engine_request_id if pin else ""

    def count_handles(self, now_ms: int, kv_usage: float) -> int:
        """Return an upper bound of the number of handles that may still be read."""
        if not kv_usage:
            self._pins.clear()
        self._prune(now_ms)
        return len(self._pins)

    def _prune(self, now_ms: int) -> None:
        expired_ids = [name for name, pin in self._pins.items() if pin.lease_ends_ms <= now_ms]
        for name in expired_ids:
            del self._pins[name]


class Releases:
    """Frees blocks in vLLM that no peer will fetch or fill."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._loop = llm, asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def begin(self, engine_request_id: str) -> None:
        """Free KV that waits for its reader; ignore an empty id."""
        if engine_request_id:
            self._start("release_kv", engine_request_id)

    def begin_later(self, request_id: str, delay_s: float) -> None:
        """Free the blocks of an ended request after a delay, in which a peer may still write."""
        if request_id not in self._timers:
            timer = self._loop.call_later(max(0.0, delay_s), self._give_up, request_id)
            self._timers[request_id] = timer

    @property
    def quarantined(self) -> int:
        """Return the number of requests whose blocks wait for the end of such a delay."""
        return len(self._timers)

    def cancel(self) -> None:
        """Cancel all releases; the engine is ending."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _give_up(self, request_id: str) -> None:
        del self._timers[request_id]
        self._start("release_unwritten", request_id)

    def _start(self, method: str, name: str) -> None:
        task = self._loop.create_task(self._release(method, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, method: str, name: str) -> None:
        for _ in range(_TRIES):  # the compute process has it one step after the last output
            try:
                results = await self._llm.collective_rpc(method, args=(name,))
            except Exception as error:
                log.warning("%s: KV not released: %r", name, error)
                return
            if any(results):
                return
            await asyncio.sleep(_PAUSE_S)

"""The producer's side of a hand-over in vLLM: handles made, and which KV still waits for its peer.

vLLM does not tell when a peer has read. What is known: the lease ends, and an engine whose KV
memory is all free holds nothing. Time is an argument. Used by `vllm_engine.py`.
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any

from schemas.records import Capability, KvHandle, Sampling
from workers.llm.text import StopText
from workers.llm.vllm_settings import VllmSettings

_TRIES, _PAUSE_S = 5, 0.05
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """KV of one prompt that was handed over."""

    engine_request_id: str
    lease_ends_ms: int


class Handover:
    """Handles of one engine."""

    def __init__(
        self, settings: VllmSettings, capability: Capability, *, worker_id: str, worker_epoch: int
    ) -> None:
        self._settings, self._capability = settings, capability
        self._worker_id, self._worker_epoch = worker_id, worker_epoch
        self._held: dict[str, Held] = {}  # in order of expiry, for the lease is one constant
        self.total = 0

    def handle(self, request_id: str, params: dict[str, Any], now_ms: int) -> KvHandle:
        """The handle for what vLLM returned with a finished prefill."""
        lease_ends_ms = now_ms + self._settings.kv_lease_s * 1_000
        engine_request_id = str(params["remote_request_id"])
        self._held.pop(request_id, None)
        self._held[request_id] = Held(engine_request_id, lease_ends_ms)
        self.total += 1
        self._prune(now_ms)
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

    def taken_back(self, request_id: str) -> str:
        """The engine's id of what is held for a request, which is no longer; "" if nothing is."""
        held = self._held.pop(request_id, None)
        return held.engine_request_id if held else ""

    def held(self, now_ms: int, kv_usage: float) -> int:
        """How many handles may still be read, at most."""
        if not kv_usage:
            self._held.clear()
        self._prune(now_ms)
        return len(self._held)

    def _prune(self, now_ms: int) -> None:
        while self._held:
            request_id, held = next(iter(self._held.items()))
            if held.lease_ends_ms > now_ms:
                return
            del self._held[request_id]


def certain_text(text: str, sampling: Sampling) -> str:
    """The first token's text without an end that may become a stop string on the peer."""
    if sampling.include_stop or not sampling.stop:
        return text
    return StopText(sampling.stop, include_stop=False).feed(text, may_stop=False)


class Releases:
    """Pinned KV that vLLM is told to free, because no peer will fetch it."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._loop = llm, asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, engine_request_id: str) -> None:
        """Free it soon; an empty id is ignored."""
        if engine_request_id:
            task = self._loop.create_task(self._release(engine_request_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _release(self, engine_request_id: str) -> None:
        for _ in range(_TRIES):  # the compute process knows of it one step after the last output
            try:
                found = await self._llm.collective_rpc("release_kv", args=(engine_request_id,))
            except Exception as error:
                log.warning("%s: KV not released: %r", engine_request_id, error)
                return
            if any(found):
                return
            await asyncio.sleep(_PAUSE_S)

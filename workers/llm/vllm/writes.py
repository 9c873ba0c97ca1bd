"""Tracks the KV that a prefill engine writes to its peers (push): which prompts are written.

vLLM writes when the prompt is computed and the decode engine has blocks. It reports only that some
write has ended; a call to its compute process returns which one. Used by `engine.py`.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schemas.errors import KvUnavailable
from workers.llm.engine import Output
from workers.llm.vllm.handover import Handover, Releases

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """A computed prompt whose KV is not written yet."""

    engine_request_id: str
    is_paired: bool  # the job then ends with the write
    limit: asyncio.TimerHandle


class Writes:
    """The pending writes of one engine; `meter` is the `Meter` of `api.py`, `put` gets outputs."""

    def __init__(
        self,
        llm: Any,
        meter: Any,
        handover: Handover,
        releases: Releases,
        put: Callable[[Output], None],
    ) -> None:
        self._llm, self._meter, self._handover = llm, meter, handover
        self._releases, self._put = releases, put
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, PendingWrite] = {}
        self._asking: asyncio.Task[None] | None = None
        self._has_news = False
        meter.on_transfers = self._on_transfers

    def __contains__(self, request_id: str) -> bool:
        """Return whether a paired job waits for its write."""
        write = self._waiting.get(request_id)
        return write is not None and write.is_paired

    @property
    def paired_count(self) -> int:
        """Return the number of paired jobs that wait for their write."""
        return sum(write.is_paired for write in self._waiting.values())

    def begin(
        self, request_id: str, engine_request_id: str, *, is_paired: bool, limit_s: float
    ) -> None:
        """Wait for the write of a computed prompt's KV, for at most `limit_s`."""
        self._forget(request_id)
        limit = self._loop.call_later(max(0.0, limit_s), self._give_up, request_id)
        self._waiting[request_id] = PendingWrite(engine_request_id, is_paired, limit)
        self._on_transfers()  # the write may already have ended

    def abort(self, request_id: str) -> None:
        """Abort a paired job that waits, and free its KV."""
        write = self._forget(request_id)
        if write is not None and write.is_paired:
            self._releases.begin(write.engine_request_id)
            self._put(Output(request_id=request_id, finish_reason="abort"))

    def cancel(self) -> None:
        """Stop waiting for writes; the engine is ending."""
        for request_id in tuple(self._waiting):
            self._forget(request_id)
        if self._asking is not None:
            self._asking.cancel()

    def _forget(self, request_id: str) -> PendingWrite | None:
        write = self._waiting.pop(request_id, None)
        if write is not None:
            write.limit.cancel()
        return write

    def _on_transfers(self) -> None:
        """Find out which write has ended."""
        self._has_news = True
        if self._waiting and (self._asking is None or self._asking.done()):
            self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        while self._has_news and self._waiting:
            self._has_news = False
            request_ids = {write.engine_request_id: name for name, write in self._waiting.items()}
            try:
                answers = await self._llm.collective_rpc("unsent_kv", args=(list(request_ids),))
            except Exception as error:
                log.warning("writes of KV: %r", error)
                return
            for engine_request_id in request_ids.keys() - {
                name for names in answers for name in names
            }:
                self._finish(request_ids[engine_request_id])

    def _finish(self, request_id: str) -> None:
        write = self._forget(request_id)
        if write is None:  # aborted meanwhile
            return
        self._handover.take_back(request_id)
        transfers = self._meter.writes
        transfer = transfers.popleft() if transfers else None
        if not self._waiting:
            transfers.clear()  # left by aborted prompts
        if write.is_paired:
            output = Output(
                request_id=request_id,
                finish_reason="handover",
                kv_bytes=transfer.kv_bytes if transfer else 0,
                transfer_ms=transfer.transfer_ms if transfer else 0.0,
            )
            self._put(output)

    def _give_up(self, request_id: str) -> None:
        write = self._forget(request_id)
        if write is not None and write.is_paired:
            self._releases.begin(write.engine_request_id)
            late = KvUnavailable(f"{request_id}: its decode engine took no KV in time")
            self._put(Output.failed(request_id, late))

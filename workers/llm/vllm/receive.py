"""KV that a vLLM engine takes from a peer: which handles are used, and what came of it.

A decode engine takes a prompt's KV, a prefill engine that of the conversation so far. Where a
handle must not be used, tokens are computed in place; a read that may have come too late is not
trusted. Pure: time is an argument. Used by `engine.py`.
"""

import logging
from collections import Counter
from typing import Any

from schemas.errors import KvUnavailable, TriviumError
from schemas.records import WorkPhase
from workers.llm.engine import Job, PeerMetadata
from workers.llm.vllm.check import HandleGate
from workers.llm.vllm.fence import WRITE_UNTIL_MS
from workers.llm.vllm.runs import VllmRun

_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_KEEP_USAGE_MAX = 0.5  # of the KV memory; above, no conversation is kept for its next turn
log = logging.getLogger(__name__)


class Receiver:
    """Of one engine; `meter` is the Meter of `api.py`.

    `mode` is how KV moves, "off" for not at all; `keeps` whether decoded KV waits for a next turn
    (vLLM can keep that of prompts which it read from a peer); `block_bytes` the size of a block.
    """

    def __init__(
        self, gate: HandleGate, meter: Any, *, mode: str, keeps: bool, block_bytes: int
    ) -> None:
        self.gate = gate
        self.counts: Counter[str] = Counter()  # refused, late and recomputed; written_bytes
        self.peer_metadata: PeerMetadata = lambda _engine_id: None
        self._meter, self._mode, self._block_bytes = meter, mode, block_bytes
        self._keeps = keeps

    @property
    def keeps_now(self) -> bool:
        """Whether an answer that ends now may keep its KV."""
        return self._keeps and bool(self._meter.figures.kv_usage <= _KEEP_USAGE_MAX)

    def prepare(self, run: VllmRun, now_ms: int) -> None:
        """Set what vLLM is to do about the job's KV."""
        job = run.job
        self.compute(run)
        if job.kv is None or (job.phase is WorkPhase.PREFILL and not self._keeps):
            return
        try:
            if self._mode == "off":
                raise KvUnavailable(f"{job.kv.engine_request_id}: this engine has no KV transfer")
            params = self._params(job, now_ms)
        except TriviumError as error:
            self.counts["refused"] += 1
            run.missed = error
            log.warning("request %s: computed in place: %s", job.request_id, error.message)
            return
        run.reads = True
        if self._mode == "push":
            run.awaited_ms = min(job.kv.expires_at_ms, job.deadline_ms)
            params[WRITE_UNTIL_MS] = run.awaited_ms
        run.kv_params = params

    def compute(self, run: VllmRun) -> None:
        """Let vLLM take nothing from a peer, and compute the prompt."""
        run.reads, run.awaited_ms = False, 0
        run.kv_params = _PREFILL if run.hands_over else None

    def _params(self, job: Job, now_ms: int) -> dict[str, Any]:
        assert job.kv is not None
        if job.phase is WorkPhase.PREFILL:
            return self.gate.use_kept(job.kv, job.prompt_tokens, now_ms)
        if job.is_paired:
            peer = self.peer_metadata(job.kv.engine_id)
            return self.gate.promise(job.kv, len(job.prompt_tokens), peer, now_ms)
        return self.gate.use(job.kv, job.prompt_tokens, now_ms)

    def is_untrusted(self, run: VllmRun, finish_reason: str | None, now_ms: int) -> bool:
        """Whether a run's first output rests on KV that may be another prompt's by now.

        vLLM does not tell when it read, so the time of the first token stands for it. It looks at
        the time itself where prefill reads kept KV, and no peer writes from blocks it gave up.
        """
        kv = run.job.kv
        if run.hands_over or not run.reads or kv is None:
            return False
        if finish_reason != "error" and (run.awaited_ms or now_ms < kv.expires_at_ms):
            return False
        self.note_late(run)
        return True

    def note_late(self, run: VllmRun) -> None:
        """A run's KV came too late."""
        self.counts["late"] += 1
        run.missed = KvUnavailable(f"{run.job.request_id}: its KV came too late")
        log.warning("request %s: its KV came too late; computed in place", run.job.request_id)

    def arrival(self, run: VllmRun, cached_tokens: int) -> tuple[int, float]:
        """Bytes and milliseconds of the read behind a first token; sets the run's own cache hits.

        `cached_tokens` is vLLM's figure, which counts received tokens as cached. Of a peer's write
        only the bytes are known here.
        """
        prefill = self._meter.prefills.pop(run.job.request_id, None)
        run.cached_tokens = cached_tokens if prefill is None else prefill.cached_tokens
        kv = run.job.kv
        if prefill is None or not run.reads or kv is None:
            return 0, 0.0
        if prefill.cached_tokens + prefill.received_tokens < kv.tokens:
            self.counts["recomputed"] += 1  # it failed, or was not worth it; vLLM computed the rest
            if kv.tokens > 1:  # else vLLM computes the one token in any case
                name, engine = run.job.request_id, kv.engine_id
                run.missed = KvUnavailable(f"{name}: KV of engine {engine} was not had")
            return 0, 0.0
        if run.awaited_ms:
            block_size = kv.block_size
            blocks = -(-kv.tokens // block_size) - prefill.cached_tokens // block_size
            self.counts["written_bytes"] += blocks * self._block_bytes
            return blocks * self._block_bytes, 0.0
        transfers = self._meter.transfers
        if not prefill.received_tokens or not transfers:
            return 0, 0.0
        transfer = transfers.popleft()
        return transfer.kv_bytes, transfer.transfer_ms

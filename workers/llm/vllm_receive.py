"""The consumer's side of a hand-over in vLLM: which handles are read, and what came of it.

Decides that a prompt is computed in place where its handle must not be used, and that a read is
not trusted where it may have come too late. Pure: time is an argument. Used by `vllm_engine.py`.
"""

import logging
from collections import Counter
from typing import Any

from schemas.errors import KvUnavailable, TriviumError
from schemas.records import WorkPhase
from workers.llm.engine import Job
from workers.llm.vllm_check import HandleGate
from workers.llm.vllm_runs import Run

PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
log = logging.getLogger(__name__)


class Receiver:
    """Reads of KV by one engine; `meter` is the Meter of `vllm_api.py`."""

    def __init__(self, gate: HandleGate, meter: Any, *, has_transfer: bool) -> None:
        self.gate = gate
        self.counts: Counter[str] = Counter()  # refused, late and recomputed
        self._meter, self._has_transfer = meter, has_transfer

    def params(self, job: Job, now_ms: int) -> dict[str, Any] | None:
        """What vLLM is to read for a decode job; None: nothing, the prompt is computed."""
        kv = job.kv
        if kv is None or job.phase is not WorkPhase.DECODE:
            return None
        try:
            if not self._has_transfer:
                raise KvUnavailable(f"{kv.engine_request_id}: this engine has no KV transfer")
            return self.gate.use(kv, len(job.prompt_tokens), now_ms)
        except TriviumError as error:
            self.counts["refused"] += 1
            log.warning("request %s: computed in place: %s", job.request_id, error.message)
            return None

    def is_untrusted(self, run: Run, finish_reason: str | None, now_ms: int) -> bool:
        """Whether a run's first output rests on KV that may be another prompt's by now.

        vLLM does not tell when it read, so the time of the first token stands for it.
        """
        kv = run.job.kv
        if run.hands_over or run.kv_params is None or kv is None:
            return False
        if now_ms < kv.expires_at_ms and finish_reason != "error":
            return False
        self.counts["late"] += 1
        log.warning("request %s: its KV came too late; computed in place", run.job.request_id)
        return True

    def arrival(self, run: Run, cached_tokens: int) -> tuple[int, float]:
        """Bytes and milliseconds of the read behind a first token; sets the run's own cache hits.

        `cached_tokens` is vLLM's figure, which counts received tokens as cached.
        """
        prefill = self._meter.prefills.pop(run.job.request_id, None)
        run.cached_tokens = cached_tokens if prefill is None else prefill.cached_tokens
        if prefill is None or run.hands_over or run.kv_params is None:
            return 0, 0.0
        if prefill.cached_tokens + prefill.received_tokens < len(run.job.prompt_tokens):
            self.counts["recomputed"] += 1  # the read failed, and vLLM computed the rest
            return 0, 0.0
        transfers = self._meter.transfers
        if not prefill.received_tokens or not transfers:
            return 0, 0.0
        transfer = transfers.popleft()
        return transfer.kv_bytes, transfer.transfer_ms

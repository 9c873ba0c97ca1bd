"""KV that a vLLM engine receives from a peer: which handles it uses, and the results.

A decode engine receives a prompt's KV. A prefill engine receives that of the conversation so far,
or of the prefix that its pair's decode engine has. If a handle must not be used, or its KV did not
arrive, the engine computes the tokens, and the run has the reason. Pure: time is an argument. Used
by `engine.py`.
"""

import logging
from collections import Counter
from typing import Any

from schemas.errors import KvUnavailable, TriviumError
from schemas.records import KvHandle, Orchestration, WorkPhase
from workers.llm.engine import Job, PeerMetadata
from workers.llm.vllm.check import TELLS_BLOCKS, UNTIL_MS, HandleGate
from workers.llm.vllm.runs import VllmRun

_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_KEEP_USAGE_MAX = 0.5  # share of used KV memory up to which conversations are kept
log = logging.getLogger(__name__)


class Receiver:
    """The receiving side of one engine; `meter` is the `Meter` of `api.py`.

    `mode` is "pull", "push" or "off". With `keeps`, decoded KV waits for the next turn (vLLM can
    keep the KV of prompts that it read from a peer). `block_bytes` is the size of a block.
    """

    def __init__(
        self, gate: HandleGate, meter: Any, *, mode: str, keeps: bool, block_bytes: int
    ) -> None:
        self.gate = gate
        self.counts: Counter[str] = Counter()  # by: refused, late, recomputed, written_bytes
        self.peer_metadata: PeerMetadata = lambda _engine_id: None
        self._meter, self._mode, self._block_bytes = meter, mode, block_bytes
        self._keeps = keeps

    @property
    def keeps_now(self) -> bool:
        """Return whether the KV of an answer that ends now may be kept."""
        return self._keeps and bool(self._meter.figures.kv_usage <= _KEEP_USAGE_MAX)

    def prepare(self, run: VllmRun, now_ms: int) -> None:
        """Set vLLM's KV parameters of a run: receive its KV, or compute the prompt."""
        self.compute(run)
        job, source = run.job, self._source(run.job)
        if source is None:
            return
        try:
            if self._mode == "off":
                raise KvUnavailable(f"{source.engine_request_id}: this engine has no KV transfer")
            params = self._params(job, source, now_ms)
        except TriviumError as error:
            self.counts["refused"] += 1
            run.missed = error
            log.warning("request %s: computed in place: %s", job.request_id, error.message)
            return
        params[UNTIL_MS] = until_ms = min(source.expires_at_ms, job.deadline_ms)
        run.source, run.kv_params = source, params
        if self._mode == "push" and job.phase is WorkPhase.DECODE:
            run.awaited_ms = until_ms
            params[TELLS_BLOCKS] = job.orchestration is Orchestration.DECODE_FIRST

    def compute(self, run: VllmRun) -> None:
        """Set vLLM's KV parameters of a run so that vLLM computes the prompt."""
        run.source, run.awaited_ms = None, 0
        run.kv_params = _PREFILL if run.hands_over else None

    def _source(self, job: Job) -> KvHandle | None:
        """Return the handle of the peer's KV for the prompt; None if there is none."""
        if job.phase is WorkPhase.DECODE:
            return job.kv
        if job.orchestration is not Orchestration.DECODE_FIRST:
            return job.kv if self._keeps else None
        return job.kv_target if job.kv_target is not None and job.kv_target.tokens else None

    def _params(self, job: Job, source: KvHandle, now_ms: int) -> dict[str, Any]:
        gate, prompt = self.gate, job.prompt_tokens
        if not job.is_paired:
            is_prefill = job.phase is WorkPhase.PREFILL
            use = gate.use_kept if is_prefill else gate.use
            return use(source, prompt, now_ms, job.adapter)
        peer = self.peer_metadata(source.engine_id)
        if job.phase is WorkPhase.PREFILL:
            return gate.use_target(source, prompt, peer, now_ms, job.adapter)
        return gate.promise(source, len(prompt), peer, now_ms)

    def note_late(self, run: VllmRun) -> None:
        """Note that a run's KV did not arrive in time."""
        self.counts["late"] += 1
        run.missed = KvUnavailable(f"{run.job.request_id}: no KV came in time")
        log.warning("%s; computed in place", run.missed.message)

    def arrival(self, run: VllmRun, cached_tokens: int) -> tuple[int, float]:
        """Return bytes and milliseconds of the read before a first token; set the run's cache hits.

        `cached_tokens` is vLLM's figure, which counts received tokens as cached; here they count
        only if prefill has read them. The duration of a peer's write is unknown here, so it is 0.
        """
        name, kv = run.job.request_id, run.source
        prefill = self._meter.prefills.pop(name, None)
        tries, why = self._meter.missed.pop(name, (0, ""))
        run.cached_tokens = cached_tokens if prefill is None else prefill.cached_tokens
        if prefill is None or kv is None:
            return 0, 0.0
        if why or prefill.cached_tokens + prefill.received_tokens < kv.tokens:
            self.counts["recomputed"] += 1  # the read failed, or vLLM chose to compute the rest
            if kv.tokens > 1:  # vLLM computes a single token in any case
                run.missed = KvUnavailable(
                    f"{name}: KV of engine {kv.engine_id} not had after {tries} tries: {why}"
                )
            return 0, 0.0
        if run.awaited_ms:
            block_size = kv.block_size
            blocks = -(-kv.tokens // block_size) - prefill.cached_tokens // block_size
            self.counts["written_bytes"] += blocks * self._block_bytes
            return blocks * self._block_bytes, 0.0
        if run.job.phase is WorkPhase.PREFILL:
            run.cached_tokens += prefill.received_tokens
        reads = self._meter.reads
        if not prefill.received_tokens or not reads:
            return 0, 0.0
        read = reads.popleft()
        return read.kv_bytes, read.transfer_ms

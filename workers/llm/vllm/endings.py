"""Ends requests that vLLM has finished: hands over, writes, keeps or frees their KV.

Called by `engine.py`.
"""

from dataclasses import replace
from typing import Any

from schemas.errors import EngineFailed, KvUnavailable
from streams.log.clock import wall_ms
from workers.llm.engine import Output
from workers.llm.stop_strings import certain_text
from workers.llm.vllm.handover import Handover, Releases
from workers.llm.vllm.receive import Receiver
from workers.llm.vllm.runs import VllmRun
from workers.llm.vllm.settings import VllmSettings
from workers.llm.vllm.writes import Writes


class KvEndings:
    """Ends the runs of one engine: hands over, keeps or frees their KV."""

    def __init__(
        self,
        settings: VllmSettings,
        handover: Handover,
        receiver: Receiver,
        releases: Releases,
        writes: Writes,
    ) -> None:
        self._settings, self._handover, self._receiver = settings, handover, receiver
        self._releases, self._writes = releases, writes

    def output(self, run: VllmRun, output: Output, kv_params: dict[str, Any] | None) -> Output:
        """Return the protocol's output for vLLM's last output of a run.

        It is not the last output of a paired prefill job, which ends when its KV is written.
        """
        name, reason = run.job.request_id, output.finish_reason
        if reason not in ("stop", "length"):
            job = run.job
            # Before its first token, only the form can fail: it was usable when its tokens were
            # generated, and KV that is not loaded is computed.
            has_form = job.sampling.structured is not None
            if reason == "error" and job.prior_tokens and has_form and not run.has_sampled:
                return job.refused_prior()
            return Output.failed(name, EngineFailed(f"{name}: vLLM ended it with {reason!r}"))
        if run.hands_over and (run.job.is_paired or reason == "length"):
            return self._hand_over(run, output, kv_params)
        kv = None
        if kv_params and not run.hands_over and self._receiver.keeps_now:
            tokens = [*run.job.prompt_tokens, *run.tokens]
            kv = self._handover.answer_handle(name, kv_params, tokens, wall_ms(), run.job.adapter)
        if kv_params and kv is None:  # no peer will read it, but vLLM would keep it
            self._releases.begin(str(kv_params.get("remote_request_id", "")))
        return replace(output, kv=kv)

    def _hand_over(self, run: VllmRun, output: Output, kv_params: dict[str, Any] | None) -> Output:
        job = run.job
        if not kv_params:
            error = KvUnavailable(f"{job.request_id}: prefill ended without a KV handle")
            return replace(output, finish_reason="error", error=error.to_wire())
        text = certain_text(output.text, job.sampling)
        if self._settings.kv_transfer == "push":
            lease_ms = self._settings.kv_lease_s * 1_000 - self._settings.handle_margin_ms
            self._writes.begin(
                job.request_id,
                str(kv_params["remote_request_id"]),
                is_paired=job.is_paired,
                limit_s=min(lease_ms, job.deadline_ms - wall_ms()) / 1_000,
            )
        if job.is_paired:
            return replace(output, finish_reason="", stop_reason="", text=text)
        kv = self._handover.handle(
            job.request_id, kv_params, job.prompt_tokens, wall_ms(), job.adapter
        )
        return replace(output, finish_reason="handover", text=text, kv=kv)

    def quarantine(self, run: VllmRun) -> None:
        """Free the blocks of a run without a token only when no peer can write to them."""
        if run.awaited_ms and not run.has_begun:
            until_ms = run.awaited_ms + self._settings.handle_margin_ms
            self._releases.begin_later(run.job.request_id, (until_ms - wall_ms()) / 1_000)

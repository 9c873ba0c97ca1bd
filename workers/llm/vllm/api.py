"""The calls into vLLM: requests, sampling and figures. Its start is in `launch.py`.

These two files, `connectors.py` and the plugin are the only ones that import vLLM, and they are
imported only when an engine starts. `workers/llm/vllm/engine.py` calls this one.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from schemas.model.adapters import AdapterFolder
from schemas.records import Sampling, TokenLogprob, TopLogprob
from workers.llm.engine import Job
from workers.llm.parsing.forms import params_fields
from workers.llm.vllm.check import request_of
from workers.llm.vllm.continued.state import PRIOR_TOKENS

__all__ = ["EngineDeadError", "VLLMClientError", "tokens_input"]

_PENDING_MAX = 4_096
_STEP_SMOOTHING = 0.1


def sampling_params(
    sampling: Sampling,
    *,
    max_tokens: int,
    kv_params: dict[str, Any] | None,
    prior_tokens: int = 0,
    stops: bool = True,
) -> SamplingParams:
    """Convert `Sampling` to vLLM's class; raises ValueError if a value is out of range.

    `prior_tokens` of the prompt are the answer's. With `stops`, vLLM looks for the stop strings.
    """
    form = sampling.structured
    extra: dict[str, Any] = {"kv_transfer_params": dict(kv_params)} if kv_params else {}
    if prior_tokens:
        extra[PRIOR_TOKENS] = prior_tokens
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop) if stops else [],
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop,
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=sampling.skip_special_tokens,
        logprobs=sampling.logprobs,
        logit_bias={int(token): bias for token, bias in sampling.logit_bias.items()} or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        bad_words=list(sampling.bad_words),
        thinking_token_budget=sampling.thinking_token_budget,
        structured_outputs=form and StructuredOutputsParams(**params_fields(form)),
        extra_args=extra or None,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,  # the object is used for one request only
    )


def lora_requests(adapters: Sequence[AdapterFolder]) -> dict[str, LoRARequest]:
    """Return vLLM's requests for adapters, by name; their order gives the numbers, from 1."""
    return {
        adapter.name: LoRARequest(adapter.name, number, str(adapter.folder))
        for number, adapter in enumerate(adapters, 1)
    }


def reasoning_arguments(job: Job) -> dict[str, Any]:
    """Return the arguments of `generate` that say where an answer's form begins."""
    arguments: dict[str, Any] = {"reasoning_ended": True} if job.binds_reasoning else {}
    if job.template_kwargs:
        kwargs = {"chat_template_kwargs": json.loads(job.template_kwargs)}
        arguments["reasoning_parser_kwargs"] = kwargs
    return arguments


def token_logprobs(
    token_ids: Sequence[int], positions: Sequence[Any] | None, top: int
) -> tuple[TokenLogprob, ...]:
    """Return the tokens' log-probabilities, each with up to `top` alternatives by rank."""
    logprobs = []
    for token_id, entries in zip(token_ids, positions or (), strict=False):
        ranked = sorted(entries.items(), key=lambda item: item[1].rank)
        chosen = entries[token_id]
        logprobs.append(
            TokenLogprob(
                token_id=token_id,
                token=chosen.decoded_token or "",
                logprob=chosen.logprob,
                top=tuple(
                    TopLogprob(
                        token_id=rival, token=entry.decoded_token or "", logprob=entry.logprob
                    )
                    for rival, entry in ranked[:top]
                ),
            )
        )
    return tuple(logprobs)


@dataclass(slots=True)
class EngineFigures:
    """Sums since the engine's start, and the last state that it reported."""

    reported_s: float = 0.0  # monotonic; an idle engine reports nothing
    kv_usage: float = 0.0
    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    kv_bytes_received: int = 0
    kv_bytes_sent: int = 0
    kv_transfers: int = 0
    kv_descriptors: int = 0
    kv_retries: int = 0
    kv_failures: int = 0
    kv_expired: int = 0


@dataclass(slots=True)
class Transfer:
    """One read or write of KV."""

    kv_bytes: int
    transfer_ms: float


@dataclass(slots=True)
class PromptOrigin:
    """The origin of a request's prompt KV, in tokens."""

    cached_tokens: int  # from the engine's own cache
    received_tokens: int  # from its peer, also if that failed


@dataclass(slots=True)
class Meter:
    """The figures that the engine reports about its steps.

    Reads and writes of KV are reported per step without their request. They are attributed to
    requests in order, so several that end in one step may be swapped; their sum is exact.
    """

    on_transfers: Callable[[], None] | None = None  # called after a step that ended transfers
    figures: EngineFigures = field(default_factory=EngineFigures)
    # called with a request's id, its blocks, and how many tokens in them are valid
    allocated: Callable[[str, list[int], int], None] | None = None
    reads: deque[Transfer] = field(default_factory=lambda: deque(maxlen=_PENDING_MAX))
    writes: deque[Transfer] = field(default_factory=lambda: deque(maxlen=_PENDING_MAX))
    missed: dict[str, tuple[int, str]] = field(default_factory=dict)  # request to tries and reason
    prefills: dict[str, PromptOrigin] = field(default_factory=dict)
    is_busy: bool = False

    def logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """Return a logger for vLLM, which takes this method as a factory."""
        return _Logger(self)

    def listen(self, output_processor: Any) -> None:
        """Record each request's prefill figures, which vLLM itself only sums."""
        process = output_processor.process_outputs

        def process_noting(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            for output in outputs:
                stats = output.prefill_stats
                if stats is not None and len(self.prefills) < _PENDING_MAX:
                    self.prefills[request_of(output.request_id)] = PromptOrigin(
                        stats.num_local_cached_tokens, stats.num_external_cached_tokens
                    )
            return process(outputs, *args, **kwargs)

        output_processor.process_outputs = process_noting

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Record one message of the engine."""
        figures, now_s = self.figures, time.monotonic()
        gap_ms = (now_s - figures.reported_s) * 1_000
        figures.reported_s = now_s
        if iteration is not None and self.is_busy:  # otherwise the engine was idle in the gap
            figures.step_ms += _STEP_SMOOTHING * (gap_ms - figures.step_ms)
            computed = iteration.prompt_token_stats.computed
            if computed:
                rate = computed / max(gap_ms, 0.1) * 1_000
                figures.prefill_tokens_per_s += _STEP_SMOOTHING * (
                    rate - figures.prefill_tokens_per_s
                )
        if scheduler is not None:
            self.is_busy = scheduler.num_running_reqs > 0
            figures.kv_usage = scheduler.kv_cache_usage
            if scheduler.kv_connector_stats:
                self._record_transfers(scheduler.kv_connector_stats)

    def _record_transfers(self, stats: dict[str, Any]) -> None:
        figures = self.figures
        figures.kv_failures += len(stats.get("num_failed_transfers", ()))
        figures.kv_failures += len(stats.get("num_failed_handshakes", ()))
        figures.kv_expired += len(stats.get("num_kv_expired_reqs", ()))
        figures.kv_retries += len(stats.get("retried", ()))
        names = ("bytes_transferred", "transfer_duration", "num_descriptors", "is_read")
        moves = [*zip(*(stats.get(name, ()) for name in names), strict=False)]
        for kv_bytes, duration_s, descriptors, is_read in moves:
            figures.kv_transfers += 1
            figures.kv_descriptors += int(descriptors)
            transfer = Transfer(int(kv_bytes), duration_s * 1_000)
            if is_read:
                figures.kv_bytes_received += transfer.kv_bytes
                self.reads.append(transfer)
            else:
                figures.kv_bytes_sent += transfer.kv_bytes
                self.writes.append(transfer)
        if moves and self.on_transfers is not None:
            self.on_transfers()
        for name, tries, why in stats.get("missed", ()):
            if len(self.missed) >= _PENDING_MAX:  # left by requests that had ended
                del self.missed[next(iter(self.missed))]
            self.missed[request_of(name)] = tries, why
        if self.allocated is not None:
            for name, blocks, tokens in stats.get("allocated", ()):
                self.allocated(request_of(name), blocks, tokens)


class _Logger(StatLoggerBase):  # type: ignore[misc]  # vLLM has no types here
    """The logger that passes vLLM's figures to the meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._meter.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        pass


class NoPrometheus(PrometheusStatLogger):  # type: ignore[misc]  # vLLM has no types here
    """Replaces vLLM's export of metrics, which no worker serves.

    vLLM registers its metrics once per process. Engines that start at once would remove each
    other's, or fail with `DuplicateTimeseries`.
    """

    def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
        pass

    def record(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_admission_rejection(self, reason: str) -> None:
        pass

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

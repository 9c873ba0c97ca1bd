"""Section [vllm]: settings of the vLLM engine. Does not import vLLM."""

import json
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from schemas.errors import ConfigError
from schemas.records import Orchestration
from schemas.sections import Natural, Positive, one_of, section

_ORCHESTRATIONS = {
    "pull": (Orchestration.PREFILL_FIRST,),
    "push": (Orchestration.PREFILL_FIRST, Orchestration.DECODE_FIRST, Orchestration.CONCURRENT),
}
_KEEP_MIN_MS = 5_000  # vLLM does not read KV that expires sooner
CPU_STEP_TOKENS = 256  # under a second; vLLM's 2 048 take seconds, and no prompt is ready sooner


@section("vllm")
class VllmSettings:
    """Section [vllm]; the defaults suit the tiny model on a small machine without a GPU."""

    dtype: str = "auto"  # float32 on CPU, where bfloat16 is slow or fails; else the model's own
    block_size: Positive = 32  # tokens per KV block; equal on workers that exchange KV
    kv_cache_bytes: Natural = 256 << 20  # 0: vLLM takes its share of the memory
    running_max: Positive = 64  # requests in the batch, at most
    # tokens of one step, at most; a step cannot be interrupted. 0: 256 on the CPU, else vLLM's own
    step_tokens: Natural = 0
    enforce_eager: bool = True  # no compilation: a quick start, slower steps on GPUs
    compact_json: bool = True  # no whitespace in JSON answers, which models may repeat endlessly
    cpu_bind: str = ""  # compute threads' cores, for VLLM_CPU_OMP_THREADS_BIND; "": environment's
    # of the engine's processes, up to 19; the worker, which keeps the lease, has priority
    nice: Natural = 10
    # pull: decode reads; push: prefill writes. Replica workers have no transfer
    kv_transfer: Annotated[str, one_of("pull", "push", "off")] = "pull"
    kv_lease_s: Annotated[int, Field(ge=2)] = 30  # how long a prefilled prompt waits for its peer
    handle_margin_ms: Natural = 5_000  # a handle's own expiry is this much earlier
    # how long KV waits for the next turn after a hand-over; pull only
    keep_decoded_kv_ms: Natural = 0
    kv_events: bool = True  # publish the changes of the prefix cache
    kv_devices: str = "lo"  # UCX's names of network devices on which KV moves, with commas; or all
    side_channel_host: str = "localhost"  # where peers request NIXL metadata
    side_channel_port: Natural = 0  # 0: a free one
    # silence of the engine while it has requests; twice that for the first token of a request that
    # no other one blocks
    progress_timeout_ms: Positive = 15_000
    extra: str = "{}"  # more arguments of vLLM's AsyncEngineArgs, as a JSON object

    def __post_init__(self) -> None:
        if self.keep_decoded_kv_ms:
            self._check_keeping()
        if self.handle_margin_ms >= self.kv_lease_s * 1_000:
            raise ConfigError(
                f"vllm.handle_margin_ms: expected less than kv_lease_s, {self.kv_lease_s} s, "
                f"found {self.handle_margin_ms} ms"
            )
        self.extra_args()

    @property
    def orchestrations(self) -> tuple[Orchestration, ...]:
        """Return the orchestrations of an engine with these settings, if its role hands KV over."""
        return _ORCHESTRATIONS.get(self.kv_transfer, ())

    def step_tokens_max(self, *, is_cpu: bool) -> int:
        """Return the token limit of a step, at least one per request; 0 for vLLM's own."""
        step_tokens = self.step_tokens or (CPU_STEP_TOKENS if is_cpu else 0)
        return max(step_tokens, self.running_max) if step_tokens else 0

    def _check_keeping(self) -> None:
        limit_ms = max(_KEEP_MIN_MS, self.handle_margin_ms)
        if self.keep_decoded_kv_ms <= limit_ms:
            raise ConfigError(
                f"vllm.keep_decoded_kv_ms: expected 0 or more than {limit_ms} ms, "
                f"found {self.keep_decoded_kv_ms} ms"
            )
        if self.kv_transfer != "pull":
            raise ConfigError(
                f"vllm.keep_decoded_kv_ms: expected 0 where kv_transfer is {self.kv_transfer}, "
                f"found {self.keep_decoded_kv_ms} ms"
            )

    def without_transfer(self) -> "VllmSettings":
        """Return the settings of a worker that never hands KV over."""
        return replace(self, kv_transfer="off", keep_decoded_kv_ms=0)

    def extra_args(self) -> dict[str, Any]:
        """Parse `extra` as a JSON object; raises ConfigError."""
        try:
            arguments = json.loads(self.extra)
        except ValueError as error:
            raise ConfigError(
                f"vllm.extra: expected a JSON object, found {self.extra!r}"
            ) from error
        if not isinstance(arguments, dict):
            raise ConfigError(f"vllm.extra: expected a JSON object, found {self.extra!r}")
        return arguments

"""Section [sim]: the simulated engine's size and latency profile.

The router's estimates do not use this profile, so that a simulation can show their errors.
"""

from typing import Annotated

from pydantic import PositiveFloat

from schemas.errors import ConfigError
from schemas.records import Orchestration
from schemas.sections import NonNegative, Positive, one_of, section

TRANSFERS = ("nixl", "memory", "none")
SCRIPT_MARKS = ("\u27e6", "\u27e7")  # around the text of the answer in a prompt
KV_HEADS = 4  # of every block; a power of two of at least 4, so that ranks can share them


@section("sim")
class SimSettings:
    """Section [sim]; the default profile is 20 ms prefill and 5 ms per token."""

    prefill_base_ms: float = 20.0
    prefill_ms_per_token: float = 0.0  # for each token that is not cached
    append_base_ms: float = -1.0  # for prompts with a cached prefix; below 0: as prefill
    append_ms_per_token: float = -1.0
    decode_step_ms: PositiveFloat = 5.0
    decode_ms_per_request: float = 0.0  # added to a step for each running request
    adapter_load_ms: NonNegative = 100.0  # for a LoRA adapter that is not loaded
    prefill_interference: float = 0.0  # share by which each running prefill lengthens a step
    running_max: Positive = 64
    prefill_running_max: Positive = 8  # prefills at once
    waiting_max: Positive = 1_024  # jobs beyond this are refused
    block_size: Positive = 16
    kv_blocks: Positive = 8_192
    tensor_parallel: Positive = 1  # ranks that share the `KV_HEADS` of every block
    handle_ttl_ms: int = 30_000  # how long KV waits for its peer
    handle_margin_ms: int = 1_000  # a handle's own expiry is this much earlier
    kv_devices: str = "lo"  # UCX's names of network devices on which KV moves, with commas; or all
    transfer: Annotated[str, one_of(*TRANSFERS)] = "nixl"  # memory: inside one process
    transfer_timeout_ms: int = 2_000
    transfer_tries_max: Positive = 4  # tries of one move or notice
    answer_tokens: int = 0  # answers end by themselves after this many tokens; 0: at max_tokens
    end_every_tokens: int = 512  # mean distance of the end of sequence; 0: never sampled
    # for tests of clients: the answer is the last text between ⟦ and ⟧ in the prompt
    scripted: bool = False

    def __post_init__(self) -> None:
        if KV_HEADS % self.tensor_parallel:
            raise ConfigError(
                f"sim.tensor_parallel: expected a divisor of {KV_HEADS}, "
                f"found {self.tensor_parallel}"
            )
        if not 0 <= self.handle_margin_ms < self.handle_ttl_ms:
            raise ConfigError(
                f"sim.handle_margin_ms: expected under handle_ttl_ms {self.handle_ttl_ms}, "
                f"found {self.handle_margin_ms}"
            )

    @property
    def orchestrations(self) -> tuple[Orchestration, ...]:
        """Return the orchestrations of an engine with these settings."""
        can = () if self.transfer == "none" else Orchestration
        return tuple(
            orchestration for orchestration in can if orchestration is not Orchestration.NONE
        )

    def prefill_s(self, tokens: int, cached_tokens: int) -> float:
        """Return the duration of a prefill, in seconds."""
        base_ms, per_token_ms = self.prefill_base_ms, self.prefill_ms_per_token
        if cached_tokens:
            base_ms = self.append_base_ms if self.append_base_ms >= 0 else base_ms
            per_token_ms = (
                self.append_ms_per_token if self.append_ms_per_token >= 0 else per_token_ms
            )
        return (base_ms + per_token_ms * (tokens - cached_tokens)) / 1_000

    def step_s(self, running: int, prefilling: int) -> float:
        """Return the duration of one decode step of the batch, in seconds."""
        step_ms = self.decode_step_ms + self.decode_ms_per_request * running
        return step_ms * (1 + self.prefill_interference * prefilling) / 1_000

"""Section [router] of the settings file; the gateway's lives in streams/gateway/config.py."""

from dataclasses import dataclass

from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How a router admits, places, remembers and recovers; names every bound of the core."""

    policy: str = "prefill_first"  # a name in streams/core/placement.py
    queue_requests_max: int = 10_000  # waiting for admission; above it the worst are shed
    queue_tokens_max: int = 8_000_000  # prompt tokens waiting for admission; likewise
    ageing_ms: int = 5_000  # a waiting request rises one priority class per this time
    attempts_max: int = 3  # placements of one request before it fails
    handover_ahead: int = 4  # prefills dispatched beyond the free decode credits
    handover_margin_ms: int = 1_000  # a KV handle that expires sooner is not used
    local_after_ms: int = (
        3_000  # without a prefill worker for so long, decode workers compute prompts
    )
    deadline_grace_ms: int = 5_000  # how long after its deadline a worker may still end a request
    assumed_prefill_tokens_per_s: int = 10_000  # for slack, where nothing is measured
    assumed_step_ms: float = 10.0  # likewise, per token of the answer
    candidates_max: int = 8  # workers named in a decision
    sessions_max: int = 100_000  # remembered conversations; the least recently used go first
    session_ttl_ms: int = 3_600_000  # without a turn for so long, a conversation is forgotten
    ended_max: int = 200_000  # remembered ids of ended requests
    early_cancels_max: int = 10_000  # cancellations read before their request
    tick_ms: int = 50
    journal_flush_ms: int = 200
    sends_pending_max: int = 10_000  # unacknowledged sends; above it the agents wait
    recovery_horizon_ms: int = 600_000  # how far back a taken partition is read
    stall_exit_ms: int = 15_000  # lag without progress for so long ends the process

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "policy":
                continue
            if value < (0 if name == "handover_ahead" else 1):
                raise ConfigError(f"router.{name}: expected a positive number, found {value}")

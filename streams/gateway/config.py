"""Section [gateway]: addresses, limits and times of the HTTP gateway.

Values are checked once, at start; nothing else in the gateway reads the environment or a file.
"""

from dataclasses import dataclass

from schemas.errors import ConfigError
from schemas.records import Priority

_AT_LEAST_ONE = (
    "body_bytes_max",
    "in_flight_max",
    "resumes_max",
    "choices_max",
    "deadline_ms",
    "deadline_ms_max",
    "accept_ms",
    "gap_ms",
    "keepalive_ms",
    "retry_after_s",
    "sessions_max",
    "session_idle_ms",
    "encode_inline_chars",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What one gateway process is allowed and told to do."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_keys: tuple[str, ...] = ()  # empty: open to everybody who can connect
    body_bytes_max: int = 4 << 20
    prompt_tokens_max: int = 0  # 0: whatever the model takes
    in_flight_max: int = 2_048  # choices being answered at once
    resumes_max: int = 64  # streams being resumed at once; each has a consumer of its own
    choices_max: int = 16  # answers of one call: n times the number of prompts
    deadline_ms: int = 120_000
    deadline_ms_max: int = 3_600_000
    priority: str = Priority.STANDARD.value  # of calls that name none
    accept_ms: int = 3_000  # longest wait for the broker to acknowledge a request
    ready_timeout_ms: int = 60_000  # longest wait for a first lease before the process gives up
    gap_ms: int = 5_000  # how long a stream waits for tokens that are missing in its middle
    keepalive_ms: int = 15_000  # a silent stream gets a comment this often, so that proxies keep it
    grace_ms: int = 20_000  # after a stop, how long streams may go on
    retry_after_s: int = 1
    sessions_max: int = 65_536  # conversations remembered for clients that send no session id
    session_idle_ms: int = 3_600_000
    encode_inline_chars: int = 8_192  # longer prompts are tokenised in a thread

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"gateway.{name}: expected at least 1, found {getattr(self, name)}"
                )
        for name in ("prompt_tokens_max", "ready_timeout_ms", "grace_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"gateway.{name}: expected at least 0, found {getattr(self, name)}"
                )
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"gateway.port: expected 0 to 65535, found {self.port}")
        if self.deadline_ms > self.deadline_ms_max:
            raise ConfigError(
                f"gateway.deadline_ms: expected at most deadline_ms_max={self.deadline_ms_max}, "
                f"found {self.deadline_ms}"
            )
        if self.priority not in set(Priority):
            raise ConfigError(
                f"gateway.priority: expected one of {', '.join(Priority)}, found {self.priority!r}"
            )
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("gateway.api_keys: expected keys, found an empty one")

"""Section [gateway]: addresses, limits and times of the HTTP gateway.

Values are checked once, at start; nothing else in the gateway reads the environment or a file.
"""

from dataclasses import dataclass

from schemas.errors import ConfigError
from schemas.records import Priority
from schemas.settings import secret
from schemas.topics import live_ms_max

EVENT_KEY_CHARS_MIN = 32
_BY_URGENCY = (Priority.INTERACTIVE, Priority.STANDARD, Priority.BATCH)
_AT_LEAST_ONE = (
    "connections_max",
    "head_ms",
    "body_ms",
    "write_ms",
    "idle_ms",
    "body_bytes_max",
    "bodies_bytes_max",
    "header_bytes_max",
    "values_max",
    "aside_ms",
    "headers_max",
    "in_flight_max",
    "resumes_max",
    "resumes_per_request_max",
    "resume_ms",
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
    api_keys: tuple[str, ...] = secret(())  # empty: open to everybody who can connect
    allowed_hosts: tuple[str, ...] = ()  # names in `Host` besides loopback and the address; or *
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call: https://chat.example, or *
    connections_max: int = 4_096
    head_ms: int = 10_000  # longest time for a request's head, from connecting or its first byte
    body_ms: int = 60_000  # likewise for its body
    write_ms: int = 30_000  # longest time without reading, of a client that has much to read
    idle_ms: int = 30_000  # without a request; clients should be first to end it (httpx: after 5 s)
    body_bytes_max: int = 4 << 20
    bodies_bytes_max: int = 256 << 20  # of all that are being read at once
    header_bytes_max: int = 32 << 10  # of a request line with all its headers
    headers_max: int = 128
    values_max: int = 32_768  # of a body, besides the token ids of one prompt
    aside_ms: int = 5_000  # longest time to check a schema or pattern, or to encode a long text
    prompt_tokens_max: int = 0  # 0: whatever the model takes
    in_flight_max: int = 2_048  # choices being answered at once
    resumes_max: int = 64  # streams being resumed at once; each has a consumer of its own
    resumes_per_request_max: int = 4  # of these
    resume_ms: int = 15_000  # how long a resume may read on after the deadline, for what is there
    event_key: str = secret("")  # signs event ids; empty: that of the state folder (event_key.py)
    choices_max: int = 16  # answers of one call: n times the number of prompts
    deadline_ms: int = 120_000
    deadline_ms_max: int = 3_600_000
    priority: str = Priority.STANDARD.value  # of calls that name none
    priority_max: str = Priority.INTERACTIVE.value  # the most urgent class that a call may name
    accept_ms: int = 3_000  # longest wait for the broker to acknowledge a request
    on_difference: str = "fail"  # an attempt repeats other tokens: fail, or mark and go on
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
        for name in ("prompt_tokens_max", "grace_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"gateway.{name}: expected at least 0, found {getattr(self, name)}"
                )
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"gateway.port: expected 0 to 65535, found {self.port}")
        if self.deadline_ms_max > live_ms_max():
            raise ConfigError(
                f"gateway.deadline_ms_max: expected at most {live_ms_max()}, while the log keeps "
                f"requests, found {self.deadline_ms_max}"
            )
        if self.deadline_ms > self.deadline_ms_max:
            raise ConfigError(
                f"gateway.deadline_ms: expected at most deadline_ms_max={self.deadline_ms_max}, "
                f"found {self.deadline_ms}"
            )
        for name in ("priority", "priority_max"):
            if (found := getattr(self, name)) not in set(Priority):
                raise ConfigError(
                    f"gateway.{name}: expected one of {', '.join(Priority)}, found {found!r}"
                )
        if self.priority not in self.priorities:
            raise ConfigError(
                f"gateway.priority: expected at most priority_max={self.priority_max}, "
                f"found {self.priority}"
            )
        if self.on_difference not in ("fail", "mark"):
            raise ConfigError(
                f"gateway.on_difference: expected fail or mark, found {self.on_difference!r}"
            )
        if self.event_key and len(self.event_key) < EVENT_KEY_CHARS_MIN:
            raise ConfigError(
                f"gateway.event_key: expected at least {EVENT_KEY_CHARS_MIN} characters, found "
                f"{len(self.event_key)}"
            )
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("gateway.api_keys: expected keys, found an empty one")
        if any(key.strip() != key or "," in key for key in self.api_keys):
            raise ConfigError("gateway.api_keys: expected no commas, and no spaces around a key")

    @property
    def priorities(self) -> tuple[str, ...]:
        """The classes that a call may have."""
        return _BY_URGENCY[_BY_URGENCY.index(Priority(self.priority_max)) :]

"""Section [gateway]: addresses, limits and times of the HTTP gateway.

Values are checked once, at start; nothing else in the gateway reads the environment or a file.
"""

from typing import Annotated

from pydantic import Field

from schemas.errors import ConfigError
from schemas.records import Priority
from schemas.rules.sizes import PASSAGES_MAX
from schemas.sections import Natural, Port, Positive, Share, Texts, one_of, secret, section
from schemas.topics import live_ms_max

EVENT_KEY_CHARS_MIN = 32
_NOT_IN_KEYS = frozenset(",\"'[]")
EVERYTHING = "*"  # in `cache_for`
BY_URGENCY = (Priority.INTERACTIVE, Priority.STANDARD, Priority.BATCH)


@section("gateway")
class GatewaySettings:
    """What one gateway process is allowed and told to do."""

    host: str = "127.0.0.1"
    port: Port = 8000  # 0: any free port
    # Calls wait for a log or workers that are away, or not there yet, for so long at most; then
    # they are refused.
    wait_ms: Natural = 10_000
    api_keys: Texts = secret(())  # empty: open to everybody who can connect
    # Whether calls with different keys share prefix caches. That is faster where prompts begin
    # alike, but times and `cached_tokens` then tell one what another has asked.
    shared_cache: bool = False
    allowed_hosts: Texts = ()  # names in `Host` besides loopback and the address; or *
    allowed_origins: Texts = ()  # of web pages that may call: https://chat.example, or *
    connections_max: Positive = 4_096
    # longest time for a request's head, from connecting or its first byte
    head_ms: Positive = 10_000
    body_ms: Positive = 60_000  # likewise for its body
    write_ms: Positive = 30_000  # longest time without reading, of a client that has much to read
    # without a request; clients should be first to end it (httpx: after 5 s)
    idle_ms: Positive = 30_000
    body_bytes_max: Positive = 4 << 20
    bodies_bytes_max: Positive = 256 << 20  # of all that are being read at once
    header_bytes_max: Positive = 32 << 10  # of a request line with all its headers
    headers_max: Positive = 128
    values_max: Positive = 32_768  # of a body, besides the token ids of one prompt
    # longest time to check a schema or pattern, or to encode a text of more than 2^20 characters,
    # or 2^18 with a model that `fastokens` does not read
    aside_ms: Positive = 5_000
    prompt_tokens_max: Natural = 0  # 0: whatever the model takes
    in_flight_max: Positive = 2_048  # choices being answered at once
    resumes_max: Positive = 64  # streams being resumed at once; each has a consumer of its own
    resumes_per_request_max: Positive = 4  # of these
    # how long a resume may read on after the deadline, for what is there
    resume_ms: Positive = 15_000
    event_key: str = secret("")  # signs event ids; empty: that of the state folder (event_key.py)
    choices_max: Positive = 16  # answers of one call: n times the number of prompts
    deadline_ms: Positive = 120_000
    deadline_ms_max: Positive = 3_600_000
    # of calls that name none, and the most urgent one that a call may name
    priority: Annotated[str, one_of(*Priority)] = Priority.STANDARD.value
    priority_max: Annotated[str, one_of(*Priority)] = Priority.INTERACTIVE.value
    ttft_ms: Positive = 2_000  # the time to the first token that is aimed at
    retrieval_share: Share = 0.5  # of it, that an answer waits for its passages at most
    # passages, where a call says none; a larger model reads more
    retrieval_k: Annotated[int, Field(ge=1, le=PASSAGES_MAX)] = 1
    retrieval_mode: Annotated[str, one_of("vector", "words", "hybrid")] = "hybrid"
    retrieval_min_score: float = 0.2  # cosine similarity; what is less similar is left out
    retrieval_tokens_max: Positive = 512  # of all passages of a prompt
    # What stands before, between and after passages, and after the question.
    context_lead: str = "Context:\n"
    context_joint: str = "\n"
    context_trail: str = "\n\nQuestion: "
    context_tail: str = "\nAnswer in one short sentence."
    probe_tokens_max: Positive = 256  # of all passages that probes put into an answer
    # Collections of which answers are kept for whoever asks the same again, although the call does
    # not say so; or *, for all chats.
    cache_for: Texts = ()
    cache_collection: Annotated[str, Field(min_length=1, max_length=128, pattern="^[^/]*$")] = (
        "answers"
    )
    # similarity of two questions, at least; their words have to be the same besides
    cache_threshold: Share = 0.8
    cache_ttl_s: Positive = 3_600
    cache_wait_ms: Positive = 100  # longest time for a lookup
    cache_entries_max: Positive = 4_096  # of each tenant
    accept_ms: Positive = 3_000  # longest wait for the broker to acknowledge a request
    # an attempt repeats other tokens: fail, or mark and go on
    on_difference: Annotated[str, one_of("fail", "mark")] = "fail"
    gap_ms: Positive = 5_000  # how long a stream waits for tokens that are missing in its middle
    # a silent stream that is to be resumed gets a comment this often, so that proxies keep it
    keepalive_ms: Positive = 15_000
    grace_ms: Natural = 20_000  # after a stop, how long streams may go on
    # then, how long who uses a connection again is told to go elsewhere (httpx: within 5 s)
    linger_ms: Natural = 6_000
    retry_after_s: Positive = 1
    file_bytes_max: Positive = 64 << 20  # of an uploaded file
    # files being uploaded at once, shared by tenants; what is large of them is on disk
    uploads_max: Positive = 8
    objects_max: Positive = 100_000  # files, vector stores, their files, batches that are kept
    tenant_objects_max: Natural = 0  # of these, of one API key; 0: an even part
    files_bytes_max: Positive = 64 << 30  # of all files that are kept
    tenant_files_bytes_max: Natural = 0  # likewise of one API key
    parse_ms: Positive = 60_000  # longest time to read what a file of a vector store says
    sessions_max: Positive = 65_536  # conversations remembered for clients that send no session id
    session_idle_ms: Positive = 3_600_000
    encode_inline_chars: Positive = 8_192  # longer prompts are tokenised in a thread

    def __post_init__(self) -> None:
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
        if self.priority not in self.priorities:
            raise ConfigError(
                f"gateway.priority: expected at most priority_max={self.priority_max}, "
                f"found {self.priority}"
            )
        if self.event_key and len(self.event_key) < EVENT_KEY_CHARS_MIN:
            raise ConfigError(
                f"gateway.event_key: expected at least {EVENT_KEY_CHARS_MIN} characters, found "
                f"{len(self.event_key)}"
            )
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("gateway.api_keys: expected keys, found an empty one")
        if any(key.strip() != key or set(key) & _NOT_IN_KEYS for key in self.api_keys):
            raise ConfigError(
                "gateway.api_keys: expected keys without commas, quotes, brackets and spaces "
                "around them; in the environment KEY,KEY, and no JSON"
            )

    @property
    def tenants(self) -> int:
        """How many keep something and ask here: one for each key."""
        return max(1, len(self.api_keys))

    @property
    def priorities(self) -> tuple[str, ...]:
        """The classes that a call may have."""
        return BY_URGENCY[BY_URGENCY.index(Priority(self.priority_max)) :]

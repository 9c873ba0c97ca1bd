"""Section [gateway]: addresses, limits and times of the HTTP gateway.

Values are checked once, at start. Nothing else in the gateway reads the environment or a file.
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
    """The settings of one gateway process: addresses, limits, times and defaults."""

    host: str = "127.0.0.1"
    port: Port = 8000  # 0: any free port
    # Calls wait at most this long while the log or the workers are not available; then they are
    # refused.
    wait_ms: Natural = 10_000
    api_keys: Texts = secret(())  # empty: any client that can connect may call
    # Whether calls with different keys share prefix caches. That is faster if prompts begin alike,
    # but timings and `cached_tokens` then reveal to one caller what another has asked.
    shared_cache: bool = False
    allowed_hosts: Texts = ()  # accepted in `Host` besides loopback and the address; or *
    allowed_origins: Texts = ()  # of web pages that may call: https://chat.example, or *
    connections_max: Positive = 4_096
    # longest time for a request's head, from connecting or its first byte
    head_ms: Positive = 10_000
    body_ms: Positive = 60_000  # longest time for a request's body
    write_ms: Positive = 30_000  # longest time that a client leaves written data unread
    # longest time without a request on a connection; clients should close it first (httpx: after 5
    # s)
    idle_ms: Positive = 30_000
    body_bytes_max: Positive = 4 << 20
    bodies_bytes_max: Positive = 256 << 20  # of all bodies that are being read at once
    header_bytes_max: Positive = 32 << 10  # of a request line and all headers
    headers_max: Positive = 128
    prompt_tokens_max: Natural = 0  # 0: the model's limit
    tokenizers_max: Positive = 4  # tokenizers kept beside the first model's; others are loaded anew
    in_flight_max: Positive = 2_048  # choices in flight at once
    event_key: str = secret("")  # signs event ids; empty: the state folder's (event_key.py)
    choices_max: Positive = 16  # answers of one call: n times the number of prompts
    deadline_ms: Positive = 120_000
    deadline_ms_max: Positive = 3_600_000
    # the default of calls that name no class, and the most urgent class that a call may name
    priority: Annotated[str, one_of(*Priority)] = Priority.STANDARD.value
    priority_max: Annotated[str, one_of(*Priority)] = Priority.INTERACTIVE.value
    ttft_ms: Positive = 2_000  # target of the time to the first token
    # passages of a call that names no number; a larger model reads more
    retrieval_k: Annotated[int, Field(ge=1, le=PASSAGES_MAX)] = 1
    retrieval_mode: Annotated[str, one_of("vector", "words", "hybrid")] = "hybrid"
    retrieval_min_score: float = 0.2  # cosine similarity; less similar passages are left out
    retrieval_tokens_max: Positive = 512  # of all passages of a prompt
    # a prompt with passages, one in each line
    context_template: str = (
        "Context:\n{passages}\n\nQuestion: {question}\nAnswer in one short sentence."
    )
    probe_tokens_max: Positive = 256  # of all passages that probes insert into an answer
    # Collections whose answers are cached by default, for later calls with the same question; or *,
    # for all chats.
    cache_for: Texts = ()
    cache_collection: Annotated[str, Field(min_length=1, max_length=128, pattern="^[^/]*$")] = (
        "answers"
    )
    # least similarity of two questions; they must also have the same words
    cache_threshold: Share = 0.8
    cache_ttl_s: Positive = 3_600
    cache_wait_ms: Positive = 100  # longest time for a lookup
    cache_entries_max: Positive = 4_096  # entries of each tenant
    accept_ms: Positive = 3_000  # longest wait for the broker to acknowledge a request
    # if an attempt repeats other tokens: fail, or mark the answer and continue
    on_difference: Annotated[str, one_of("fail", "mark")] = "fail"
    # whether the reasoning of an answer is in `reasoning_content`, too, where older clients read it
    reasoning_content: bool = False
    gap_ms: Positive = 5_000  # how long a stream waits for tokens that are missing in its middle
    # what becomes of tools in calls of /v1/responses that nobody here can run, such as web_search
    unserved_tools: Annotated[str, one_of("refuse", "ignore")] = "ignore"
    # whether each stream of a chat or completion ends with its usage, or those whose call asks so
    include_usage: Annotated[str, one_of("asked", "always")] = "asked"
    # interval of comments on a silent stream with event ids, so that proxies keep the connection
    keepalive_ms: Positive = 15_000
    grace_ms: Natural = 20_000  # after a stop, how long streams may continue
    # after that, how long requests on open connections get an error, so that clients reconnect
    # elsewhere (httpx: within 5 s)
    linger_ms: Natural = 6_000
    file_bytes_max: Positive = 64 << 20  # of an uploaded file
    # files uploaded at once, shared by tenants; large ones are on disk
    uploads_max: Positive = 8
    objects_max: Positive = 100_000  # files, vector stores, their files, batches, conversations
    tenant_objects_max: Natural = 0  # objects of one API key; 0: an equal share
    files_bytes_max: Positive = 64 << 30  # of all stored files
    tenant_files_bytes_max: Natural = 0  # files of one API key; 0: an equal share
    # of the items of all conversations, in the memory of each gateway; API keys have equal shares
    conversations_bytes_max: Positive = 256 << 20
    parse_ms: Positive = 60_000  # longest time to extract a file's text for a vector store
    sessions_max: Positive = 65_536  # conversations remembered for clients that send no session id

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
        self.context_texts()  # raises
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("gateway.api_keys: expected keys, found an empty one")
        if any(key.strip() != key or set(key) & _NOT_IN_KEYS for key in self.api_keys):
            raise ConfigError(
                "gateway.api_keys: expected keys without commas, quotes, brackets and spaces "
                "around them; in the environment KEY,KEY, and no JSON"
            )

    def context_texts(self) -> tuple[str, str, str]:
        """Return the texts before, between and behind passages and question; raises ConfigError."""
        lead, passages, rest = self.context_template.partition("{passages}")
        trail, question, tail = rest.partition("{question}")
        if not (passages and question):
            raise ConfigError(
                "gateway.context_template: expected {passages} and then {question} in it, found "
                f"{self.context_template!r}"
            )
        return lead, trail, tail

    @property
    def tenants(self) -> int:
        """Return the number of tenants: one per API key, at least 1."""
        return max(1, len(self.api_keys))

    @property
    def priorities(self) -> tuple[str, ...]:
        """Return the classes that a call may name, the most urgent first."""
        return BY_URGENCY[BY_URGENCY.index(Priority(self.priority_max)) :]

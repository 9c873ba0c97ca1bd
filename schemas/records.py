"""The records that cross Kafka, as frozen dataclasses.

One class per schema in `schemas/avro`, which is the source of truth: `tests/schemas` compares them
field by field. Field documentation lives there. Nothing here encodes, decodes or validates
(`schemas/codec.py` does).
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum

from schemas.frozen import frozen


class Priority(StrEnum):
    """Priority class of a request; admission serves interactive before standard before batch."""

    STANDARD = "standard"
    INTERACTIVE = "interactive"
    BATCH = "batch"


class Endpoint(StrEnum):
    """The OpenAI endpoint that the request came through."""

    CHAT = "chat"
    COMPLETION = "completion"


class StructuredKind(StrEnum):
    """How the answer's form is constrained."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


class CancelReason(StrEnum):
    """Why a request was cancelled."""

    CLIENT_REQUEST = "client_request"
    CLIENT_GONE = "client_gone"
    GATEWAY_LOST = "gateway_lost"


class WorkPhase(StrEnum):
    """Which phase of the request the worker is to run.

    Decode without a KV handle computes the prompt in place.
    """

    PREFILL = "prefill"
    DECODE = "decode"


class Mode(StrEnum):
    """Where prefill runs.

    Elsewhere with KV transferred, on the decode worker that holds the history, or on a replica;
    none before placement.
    """

    NONE = "none"
    REMOTE = "remote"
    LOCAL = "local"
    REPLICA = "replica"


class Orchestration(StrEnum):
    """How a remote placement runs."""

    NONE = "none"
    PREFILL_FIRST = "prefill_first"
    DECODE_FIRST = "decode_first"
    CONCURRENT = "concurrent"

    @property
    def is_paired(self) -> bool:
        """Prefill writes the KV into decode's blocks, while both hold the attempt."""
        return self in _PAIRED


_PAIRED = (Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)


class PhaseKind(StrEnum):
    """What finished."""

    UNKNOWN = "unknown"
    PREFILL_DONE = "prefill_done"
    KV_RECEIVED = "kv_received"
    REFUSED = "refused"
    FAILED = "failed"
    KV_ALLOCATED = "kv_allocated"


class OutcomeKind(StrEnum):
    """How an accepted request ended."""

    FAILED = "failed"
    COMPLETED = "completed"
    SHED = "shed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class DecisionKind(StrEnum):
    """What the router decided."""

    UNKNOWN = "unknown"
    PLACE = "place"
    HANDOFF = "handoff"
    REPLACE = "replace"
    SHED = "shed"
    EXPIRE = "expire"
    CANCEL = "cancel"
    FAIL = "fail"
    VOID = "void"


class Reason(StrEnum):
    """Why the router decided so."""

    UNKNOWN = "unknown"
    ONLY_REPLICAS = "only_replicas"
    LEAST_WORK = "least_work"
    SESSION_WORKER = "session_worker"
    SESSION_WORKER_FULL = "session_worker_full"
    SESSION_WORKER_GONE = "session_worker_gone"
    PREFILL_DONE = "prefill_done"
    KV_EXPIRED = "kv_expired"
    KV_PRODUCER_GONE = "kv_producer_gone"
    WORKER_LOST = "worker_lost"
    WORKER_REFUSED = "worker_refused"
    WORKER_FAILED = "worker_failed"
    QUEUE_FULL = "queue_full"
    DEADLINE_PASSED = "deadline_passed"
    CLIENT_REQUEST = "client_request"
    CLIENT_GONE = "client_gone"
    GATEWAY_LOST = "gateway_lost"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    REQUEST_FAILED = "request_failed"
    NO_WORKER = "no_worker"
    ROUTER_RESTARTED = "router_restarted"
    DRAINING = "draining"
    FIRST_TURN = "first_turn"
    BELOW_LENGTH = "below_length"
    PREFILL_QUEUE_LONG = "prefill_queue_long"
    ABOVE_LENGTH = "above_length"
    FIXED_SHARE = "fixed_share"
    TABLE = "table"
    LEARNED = "learned"
    EXPLORING = "exploring"
    TOO_LITTLE_KNOWN = "too_little_known"
    PREFIX_CACHED = "prefix_cached"
    PEER_FAILED = "peer_failed"


class Unmet(StrEnum):
    """Why a placement is not what was wished."""

    NONE = "none"
    UNKNOWN_POLICY = "unknown_policy"
    NO_WORKER = "no_worker"
    NOT_REMOTE = "not_remote"
    NO_DECODE_ROOM = "no_decode_room"
    ONE_TOKEN = "one_token"
    ONE_WORKER = "one_worker"
    ENGINES_CANNOT = "engines_cannot"


class MemberKind(StrEnum):
    """What kind of process a fleet member is."""

    UNKNOWN = "unknown"
    WORKER = "worker"
    GATEWAY = "gateway"
    ROUTER = "router"
    ASKER = "asker"


class Role(StrEnum):
    """Which work a worker takes."""

    UNKNOWN = "unknown"
    PREFILL = "prefill"
    DECODE = "decode"
    REPLICA = "replica"
    RETRIEVAL = "retrieval"


class MemberState(StrEnum):
    """Where a member is in its life."""

    GONE = "gone"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@frozen
class Structured:
    """A constraint on the form of the answer."""

    kind: StructuredKind
    value: str


@frozen
class Sampling:
    """How tokens are drawn and when generation stops.

    Every field has a value, so engines never guess defaults.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    structured: Structured | None = None


@frozen
class WireError:
    """An error as it travels; see schemas/errors.py for the tree."""

    code: str
    message: str
    retriable: bool = False


@frozen
class KvHandle:
    """Where computed KV lies, and until when it may be read. Used once."""

    worker_id: str
    worker_epoch: int
    engine_id: str
    engine_request_id: str
    tokens: int
    block_size: int
    block_ids: Sequence[int] = ()
    expires_at_ms: int
    params: bytes = b""


@frozen
class Request:
    """One accepted chat or completion call."""

    request_id: str
    parent_id: str
    choice: int = 0
    session_id: str
    turn: int = 0
    endpoint: Endpoint
    priority: Priority
    tenant: str = ""
    model: str
    prompt_tokens: bytes
    sampling: Sampling
    arrived_ms: int
    deadline_ms: int
    gateway_id: str
    gateway_partition: int
    w_ttft: float = -1.0
    w_tpot: float = -1.0
    policy: str = ""
    orchestration: str = ""
    gateway_started_ms: int = 0
    keeps_running: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, which is packed as int32."""
        return len(self.prompt_tokens) // 4


@frozen
class Cancellation:
    """The client or its gateway gave a request up."""

    request_id: str
    session_id: str
    reason: CancelReason
    at_ms: int
    tenant: str = ""


@frozen
class Resumption:
    """A client reads the answer of a request at another gateway than before."""

    request_id: str
    session_id: str
    gateway_id: str
    gateway_started_ms: int
    at_ms: int


@frozen
class Work:
    """One phase of a request, for one worker."""

    request_id: str
    session_id: str
    attempt: int
    router_id: str
    worker_id: str
    worker_epoch: int
    phase: WorkPhase
    mode: Mode
    orchestration: Orchestration
    model: str
    prompt_tokens: bytes
    sampling: Sampling
    arrived_ms: int
    deadline_ms: int
    gateway_partition: int
    prefill_worker: str = ""
    first_token_ms: int = 0
    first_seq: int = 0
    first_char: int = 0
    cached_tokens: int = 0
    kv: KvHandle | None = None
    dispatched_ms: int
    kv_target: KvHandle | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, which is packed as int32."""
        return len(self.prompt_tokens) // 4


@frozen
class CancelWork:
    """Stop a request on one worker and free what it holds."""

    request_id: str
    attempt: int
    worker_id: str
    at_ms: int
    void: bool = False


@frozen
class AssignRoles:
    """An operator gives a worker other roles, while it runs."""

    worker_id: str
    worker_epoch: int
    roles: Sequence[Role]
    at_ms: int


@frozen
class Phase:
    """A finished step of a request on a worker."""

    request_id: str
    session_id: str
    attempt: int
    router_id: str
    worker_id: str
    worker_epoch: int
    kind: PhaseKind
    started_ms: int
    ended_ms: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sent_tokens: int = 0
    sent_chars: int = 0
    kv_bytes: int = 0
    transfer_ms: float = 0.0
    kv: KvHandle | None = None
    error: WireError | None = None
    kv_read_bytes: int = 0


@frozen
class Outcome:
    """A terminal record of an accepted request; schemas/rules/outcomes.py says which counts."""

    request_id: str
    session_id: str
    attempt: int
    kind: OutcomeKind
    finish_reason: str = ""
    error: WireError | None = None
    written_by: str
    mode: Mode = Mode.NONE
    prefill_worker: str = ""
    decode_worker: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    kv_bytes: int = 0
    arrived_ms: int = 0
    first_token_ms: int = 0
    ended_ms: int
    kv: KvHandle | None = None
    orchestration: Orchestration = Orchestration.NONE


@frozen
class Candidate:
    """A worker that a decision looked at."""

    worker_id: str
    role: Role
    credits: int
    running: int
    work_ahead_tokens: int
    cached_tokens: int = 0


@frozen
class Estimate:
    """What a policy expected of the two ways to run a request."""

    ttft_local_ms: float = 0.0
    ttft_remote_ms: float = 0.0
    tpot_local_ms: float = 0.0
    tpot_remote_ms: float = 0.0
    score: float = 0.0
    samples: int = 0
    gain_ttft: float = 0.0
    loss_tpot: float = 0.0
    kv_price: float = 0.0


@frozen
class Decision:
    """One decision of a router, with what it looked at."""

    request_id: str
    session_id: str
    attempt: int
    router_id: str
    at_ms: int
    kind: DecisionKind
    policy: str
    reason: Reason
    mode: Mode = Mode.NONE
    orchestration: Orchestration = Orchestration.NONE
    prefill_worker: str = ""
    prefill_epoch: int = 0
    decode_worker: str = ""
    decode_epoch: int = 0
    queue_length: int = 0
    waited_ms: int = 0
    slack_ms: int = 0
    prompt_tokens: int = 0
    session_tokens: int = 0
    candidates: Sequence[Candidate] = ()
    w_ttft: float = 0.0
    w_tpot: float = 0.0
    load: float = 0.0
    estimate: Estimate | None = None
    wished_policy: str = ""
    wished_orchestration: str = ""
    unmet: Unmet = Unmet.NONE
    policy_reason: Reason = Reason.UNKNOWN


@frozen
class JournalBatch:
    """Which records a router applied, in which order and at which time; columns of equal length."""

    router_id: str
    router_epoch: int
    first_seq: int
    topics: Sequence[str]
    partitions: Sequence[int]
    offsets: Sequence[int]
    now_ms: Sequence[int]


@frozen
class Session:
    """What a router remembers of a conversation."""

    session_id: str
    decode_worker: str
    worker_epoch: int
    context_tokens: int
    turns: int
    last_used_ms: int
    kv: KvHandle | None = None


@frozen
class TurnBatch:
    """Answers that ended: what the next turns of their conversations begin with, for clients that
    name no session; columns of equal length."""

    gateway_id: str
    at_ms: int
    digests: Sequence[bytes]
    session_ids: Sequence[str]


@frozen
class Lease:
    """A partition that belongs to one member."""

    topic: str
    partition: int


@frozen
class Capability:
    """What a worker's engine is and can do."""

    model: str
    engine: str
    engine_id: str
    block_size: int
    max_model_len: int
    running_max: int
    kv_layout: str = ""
    orchestrations: Sequence[Orchestration] = ()
    nixl_metadata: bytes = b""
    tensor_parallel: int = 1
    kv_bytes_per_token: int = 0


@frozen
class SearchCapability:
    """Which part of the collections a retrieval worker holds, and with what it searches."""

    shard: int
    shards: int
    backend: str
    slots: int


@frozen
class CollectionState:
    """A collection as one retrieval worker holds it."""

    name: str
    dim: int
    metric: str
    documents: int
    missed_share: float = 0.0


@frozen
class SearchLoad:
    """What a retrieval worker is doing now; waits are of the last seconds."""

    running: int = 0
    parked: int = 0
    occupancy: float = 0.0
    waiting_prefill: int = 0
    waiting_decode: int = 0
    ms_per_extend: float = 0.0
    prefill_wait_ms_p50: float = 0.0
    prefill_wait_ms_p95: float = 0.0
    decode_wait_ms_p50: float = 0.0
    decode_wait_ms_p95: float = 0.0
    share: float = 0.0
    flush_ms: float = 0.0
    searches_total: int = 0
    misses_total: int = 0
    collections: Sequence[CollectionState] = ()


@frozen
class Registration:
    """A member of the fleet introduces itself; written once per start and role change."""

    member_id: str
    epoch: int
    kind: MemberKind
    roles: Sequence[Role] = ()
    leases: Sequence[Lease] = ()
    host: str = ""
    pid: int = 0
    url: str = ""
    started_ms: int
    capability: Capability | None = None
    search: SearchCapability | None = None


@frozen
class Grant:
    """How many requests one router may have on a worker."""

    router_id: str
    role: Role
    credits: int


@frozen
class Load:
    """What a member is doing now."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    step_ms: float = 0.0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    requests_total: int = 0
    tokens_total: int = 0
    stalled_share: float | None = None


@frozen
class Heartbeat:
    """A member lives; the lease dies with it."""

    member_id: str
    epoch: int
    seq: int
    at_ms: int
    state: MemberState
    grants: Sequence[Grant] = ()
    load: Load
    search: SearchLoad | None = None


@frozen
class RetrievalRequest:
    """One vector search, for every shard of a collection."""

    retrieval_id: str
    request_id: str
    asker_id: str
    reply_partition: int
    collection: str
    vector: bytes
    k: int
    top_m: int = 0
    width: int = 0
    patience: int = 0
    filter: str = ""
    seeds: Sequence[str] = ()
    wants_seeds: bool = False
    asked_ms: int
    deadline_ms: int


@frozen
class Hits:
    """What one shard found for a retrieval, nearest first, or why it found nothing."""

    retrieval_id: str
    request_id: str
    worker_id: str
    shard: int
    shards: int
    collection: str
    document_ids: Sequence[str] = ()
    distances: bytes = b""
    seeds: Sequence[str] = ()
    error: WireError | None = None
    exact: bool = False
    extends: int = 0
    distances_computed: int = 0
    took_ms: float = 0.0
    at_ms: int


@frozen
class Document:
    """A document as it can be found: its vector and its metadata."""

    document_id: str
    collection: str
    vector: bytes
    metadata: str = ""
    deleted: bool = False
    at_ms: int


@frozen
class CollectionMade:
    """What a collection is on one shard, from its first document on; it outlives that document."""

    collection: str
    dim: int
    shard: int
    shards: int
    at_ms: int


@frozen
class ControlMoved:
    """The control loop of a retrieval worker moved prefill's share or its flush timeout."""

    worker_id: str
    at_ms: int
    link_bytes_per_s: float | None = None
    prefill_wait_ms_p95: float | None = None
    decode_stalled_share: float | None = None
    error: float
    share_before: float
    share: float
    flush_ms_before: float
    flush_ms: float


@frozen
class KvEvents:
    """Which KV blocks a worker came to hold in its prefix cache, or lost, since its last batch."""

    worker_id: str
    epoch: int
    seq: int
    at_ms: int
    block_size: int
    snapshot: bool = False
    more: bool = False
    stored: bytes = b""
    removed: bytes = b""


@frozen
class TopLogprob:
    """One of the likeliest tokens."""

    token_id: int
    token: str
    logprob: float


@frozen
class TokenLogprob:
    """The log-probability of a generated token and of its rivals."""

    token_id: int
    token: str
    logprob: float
    top: Sequence[TopLogprob] = ()


@frozen
class StreamLogprobs:
    """Log-probabilities of consecutive tokens of one stream."""

    request_id: str
    attempt: int
    first_seq: int
    tokens: Sequence[TokenLogprob]


@frozen
class StreamEnd:
    """The last word on one stream."""

    request_id: str
    attempt: int
    seq: int
    chars: int
    kind: OutcomeKind
    finish_reason: str = ""
    stop_reason: str = ""
    error: WireError | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    mode: Mode = Mode.NONE
    prefill_worker: str = ""
    decode_worker: str = ""
    kv_bytes: int = 0


@frozen
class StreamStart:
    """How and where a stream is run, told once with its first token."""

    request_id: str
    attempt: int
    mode: Mode = Mode.NONE
    orchestration: Orchestration = Orchestration.NONE
    prefill_worker: str = ""
    decode_worker: str = ""


@frozen
class TokenFrame:
    """New tokens of all streams of one gateway after one engine step.

    Columns of equal length, one row per stream.
    """

    worker_id: str
    at_ms: int
    request_ids: Sequence[str]
    attempts: Sequence[int]
    first_seqs: Sequence[int]
    first_chars: Sequence[int]
    token_counts: Sequence[int]
    token_ids: Sequence[int]
    texts: Sequence[str]
    logprobs: Sequence[StreamLogprobs] = ()
    ends: Sequence[StreamEnd] = ()
    starts: Sequence[StreamStart] = ()

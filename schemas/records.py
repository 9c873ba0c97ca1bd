"""The records that cross Kafka, as frozen dataclasses, and their enums.

Generated from `schemas/avro` by `make schemas`; never edited. Nothing here encodes, decodes or
validates (`schemas/codec.py` does).
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum

from schemas.frozen import frozen


class CancelReason(StrEnum):
    """Why a request was cancelled."""

    CLIENT_REQUEST = "client_request"
    CLIENT_GONE = "client_gone"
    GATEWAY_LOST = "gateway_lost"


class DecisionKind(StrEnum):
    """What the router decided about a request."""

    UNKNOWN = "unknown"
    PLACE = "place"
    HANDOFF = "handoff"
    REPLACE = "replace"
    SHED = "shed"
    EXPIRE = "expire"
    CANCEL = "cancel"
    FAIL = "fail"
    VOID = "void"
    COMPUTE = "compute"


class DeltaKind(StrEnum):
    """Which part of an answer a delta adds to."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


class Endpoint(StrEnum):
    """The OpenAI endpoint that the request came through."""

    CHAT = "chat"
    COMPLETION = "completion"


class MemberKind(StrEnum):
    """What kind of process a fleet member is."""

    UNKNOWN = "unknown"
    WORKER = "worker"
    GATEWAY = "gateway"
    ROUTER = "router"
    ASKER = "asker"


class MemberState(StrEnum):
    """Where a member is in its life."""

    GONE = "gone"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Mode(StrEnum):
    """Where prefill runs: elsewhere with KV transferred, on the decode worker that holds the
    history, or on a replica; none before placement.
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


class OutcomeKind(StrEnum):
    """How an accepted request ended."""

    FAILED = "failed"
    COMPLETED = "completed"
    SHED = "shed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class PhaseKind(StrEnum):
    """Which step of its work a worker finished or gave up."""

    UNKNOWN = "unknown"
    PREFILL_DONE = "prefill_done"
    KV_RECEIVED = "kv_received"
    REFUSED = "refused"
    FAILED = "failed"
    KV_ALLOCATED = "kv_allocated"
    KV_MISSED = "kv_missed"


class Priority(StrEnum):
    """Priority class of a request; admission serves interactive before standard before batch."""

    STANDARD = "standard"
    INTERACTIVE = "interactive"
    BATCH = "batch"


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
    DEADLINE_NEAR = "deadline_near"
    KV_MISSED = "kv_missed"


class Role(StrEnum):
    """Which work a worker takes."""

    UNKNOWN = "unknown"
    PREFILL = "prefill"
    DECODE = "decode"
    REPLICA = "replica"
    RETRIEVAL = "retrieval"
    EMBEDDING = "embedding"


class StructuredKind(StrEnum):
    """How the answer's form is constrained."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


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


class WorkPhase(StrEnum):
    """Which phase of the request the worker is to run; decode without a KV handle computes the
    prompt in place.
    """

    PREFILL = "prefill"
    DECODE = "decode"


@frozen
class Answer:
    """The one answer to one prompt record, under its key. An error is an answer, too."""

    prompt_topic: str  # where its prompt is
    prompt_partition: int  # likewise; the answer is on the partition of the same number
    prompt_offset: int  # likewise
    prompt_ms: int = 0  # the prompt record's timestamp
    request_id: str = ""  # the request, for `trivium explain`; empty where none was made
    text: str | None = None  # what was answered; none after an error without a fallback
    # the same as a JSON value, where a response format asked for one; none beside tool calls
    parsed: str | None = None
    tool_calls: str | None = None  # JSON list of the tool calls, as in chats
    reasoning: str | None = None  # what the model reasoned before, where the deployment parses it
    finish_reason: str = ""  # stop, length or tool_calls; empty after an error
    model: str = ""  # who answered
    prompt_tokens: int = 0  # tokens read
    cached_tokens: int = 0  # of these, found in a cache
    retrieved_tokens: int = 0  # of these, looked up
    completion_tokens: int = 0  # tokens written
    reasoning_tokens: int = 0  # of these, reasoning
    citations: str | None = None  # a JSON array of what was looked up, as in chats
    asked_ms: int = 0  # wall time when it was asked
    first_token_ms: int = 0  # wall time of the first token, 0 if there was none
    ended_ms: int = 0  # wall time of the end
    tries: int = 0  # how often it was asked
    error_code: str | None = None  # of schemas/errors.py; none for an answer
    error_message: str | None = None  # what was expected and what was found
    error_retriable: bool = False  # whether the same prompt may be answered when it is sent again
    fallback: bool = False  # whether text is the topic's fallback
    metadata: str | None = None  # the prompt's
    # the whole answer of the OpenAI API as JSON, where the topic asks for it
    body: str | None = None


@frozen
class AnswerDelta:
    """What some tokens of a parsed answer add to it."""

    # how many tokens of the answer a reader must have before this counts; in an end: of the whole
    # answer
    seq: int
    kind: DeltaKind  # which part of the answer it adds to
    text: str = ""  # the new content or reasoning, or more of the arguments of a tool call
    index: int = 0  # number of the tool call in the answer, from 0
    call_id: str = ""  # id of the tool call, in its first delta; the same in every attempt
    name: str = ""  # name of the called function, in the first delta of the tool call


@frozen
class AnswerPart:
    """Some more of an answer while it is generated. Repeats have the numbers that they had."""

    prompt_topic: str  # where its prompt is
    prompt_partition: int  # likewise
    prompt_offset: int  # likewise
    request_id: str  # the request
    seq: int  # number of its first token in the answer
    tokens: int  # how many tokens it has
    start: int  # where its text begins in the text of the answer, in characters
    text: str  # the new text
    finish_reason: str = ""  # in the last part: stop, length, tool_calls or error
    reasoning: str | None = None  # the new reasoning
    # JSON list: what is new of the tool calls, as in the deltas of streamed chats
    tool_calls: str | None = None


@frozen
class AssignRoles:
    """An operator gives a worker other roles, while it runs."""

    worker_id: str  # which worker
    worker_epoch: int  # in which life; another life ignores it
    roles: Sequence[Role]  # its roles from now on
    at_ms: int  # wall time at the operator


@frozen
class Backlog:
    """What waits at a router, and what the requests of the last seconds ask of workers; means are 0
    while unknown.
    """

    waiting: int = 0  # requests in the queue
    oldest_ms: int = 0  # how long the longest of them has waited
    # of them, the least time that is left beyond the work; 0: nobody waits, or it is too late
    slack_ms: int = 0
    handing_over: int = 0  # requests whose prompt is computed and that wait for decode
    retrieving: int = 0  # requests that wait for a search
    requests_per_s: float = 0.0  # that come to the queue
    prompt_tokens: float = 0.0  # of a prompt, on average
    answer_tokens: float = 0.0  # of an answer, on average
    prefill_ms: float = 0.0  # of a prefill worker's time, for one request on average
    append_ms: float = 0.0  # of a decode or replica worker's time for a prompt, likewise
    step_ms: float = 0.0  # time of a token of a lone answer
    sharing_ms: float = 0.0  # what one more answer of a batch adds to it
    model: str = ""  # of which model; empty: not told


@frozen
class Batch:
    """What a caller says of a batch of calls."""

    batch_id: str  # batch_...
    tenant: str = ""  # whose it is; nobody else sees it
    input_file_id: str  # the file of its calls, one a line
    endpoint: str  # of all its calls, as /v1/chat/completions
    window: str = "24h"  # within which it is to be done, as its caller says it
    metadata: str = ""  # a JSON object of texts, empty for none
    created_ms: int  # wall time
    expires_ms: int  # wall time after which what is not answered is given up
    cancelled_ms: int = 0  # wall time when its caller gave it up, 0: not
    # after which the files of its results are deleted, from when they are there; 0: never
    output_expires_s: int = 0


@frozen
class BatchProgress:
    """What has come of a batch; written by the gateway that carries batches out, in one transaction
    with what it tells of.
    """

    batch_id: str  # which batch
    tenant: str = ""  # whose it is
    # as OpenAI names them: validating, failed, in_progress, finalizing, completed, expired,
    # cancelling, cancelled
    status: str
    total: int = 0  # lines of its file
    sent_lines: int = 0  # of these, on batch.prompts
    sent_bytes: int = 0  # of its file, up to the end of the last line that was sent
    completed: int = 0  # lines with an answer
    failed: int = 0  # lines with an error
    # offsets of batch.answers, by partition, up to which its answers are in its files
    answers_from: Sequence[int] = ()
    answered: bytes = b""  # a bit for each line, the lowest first: 1 where it is in a file
    output_file_id: str = ""  # of answers
    output_parts: Sequence[int] = ()  # offsets of its parts so far
    output_bytes: int = 0  # of all of them
    error_file_id: str = ""  # of errors
    error_parts: Sequence[int] = ()  # offsets of its parts so far
    error_bytes: int = 0  # of all of them
    prompt_tokens: int = 0  # tokens read for its answers
    cached_tokens: int = 0  # of these, found in a cache
    completion_tokens: int = 0  # tokens written
    reasoning_tokens: int = 0  # of these, reasoning
    errors: str = ""  # a JSON array of what is wrong with its file, empty for none
    started_ms: int = 0  # wall time when its lines began to be asked, 0: not yet
    finalizing_ms: int = 0  # wall time when all had an answer, 0: not yet
    ended_ms: int = 0  # wall time of the end, 0: not yet
    at_ms: int  # wall time of this record


@frozen
class CancelWork:
    """Stop a request on one worker and free what it holds."""

    request_id: str  # the request
    attempt: int  # this attempt and all lower ones
    worker_id: str  # on which worker
    at_ms: int  # wall time at the router
    # the attempt goes on elsewhere or was ended by another: free what is held and write no outcome
    void: bool = False


@frozen
class Cancellation:
    """The client or its gateway gave a request up."""

    request_id: str  # the request
    session_id: str  # its session
    reason: CancelReason  # why
    at_ms: int  # wall time
    # whose key was used, and only that tenant's request is given up; empty: not told
    tenant: str = ""


@frozen
class Candidate:
    """A worker that a decision looked at."""

    worker_id: str  # the worker
    role: Role  # in which role
    credits: int  # how many more requests it would take from this router
    running: int  # requests that this router has on it
    # prompt tokens that this router has given it and that are not computed yet
    work_ahead_tokens: int
    cached_tokens: int = 0  # prompt tokens that its prefix cache is thought to hold


@frozen
class Capability:
    """What a worker's engine is and can do."""

    model: str  # served model name
    engine: str  # engine name
    engine_id: str  # unique per start
    block_size: int  # tokens per KV block
    max_model_len: int  # most tokens of prompt and answer together
    running_max: int  # most requests in the batch
    kv_layout: str = ""  # workers with equal layouts can exchange KV
    orchestrations: Sequence[Orchestration] = ()  # which it can take part in
    nixl_metadata: bytes = b""  # the NIXL agent's metadata, read once by peers
    tensor_parallel: int = 1  # ranks over which each KV block is spread
    kv_bytes_per_token: int = 0  # bytes of KV of one token over all ranks; 0: not told
    triggers: Sequence[str] = ()  # of probes, that are installed there; none: not told
    adapters: Sequence[str] = ()  # LoRA adapters that it can load, by name
    adapters_max: int = 0  # how many of them a batch may use


@frozen
class Chunk:
    """A passage of a document, as the embedding pool cut it."""

    text: str  # what it says
    start: int  # where it begins in the document's text, in characters
    vector: bytes  # float32, little-endian
    # token ids of the served model as little-endian int32, ready to be put into a prompt
    tokens: bytes = b""


@frozen
class Citation:
    """A passage that stands in a request's prompt."""

    passage_id: str  # DOCUMENT#NUMBER
    document_id: str  # its document
    title: str = ""  # from the document's metadata
    source: str = ""  # from the document's metadata
    text: str = ""  # what it says
    start: int = 0  # where it begins in the document's text, in characters
    score: float = 0.0  # cosine similarity to what was searched for
    seq: int = 0  # before which token of the answer it was put in
    content: str = ""  # DocumentPassages.content_hash of its document
    probe: int = 0  # which probe brought it, from 1; 0: it was found before the answer


@frozen
class CollectionDeclared:
    """What an operator says of a collection, before or after its first document; the last record
    counts.
    """

    collection: str  # its name
    tenants: Sequence[str] = ()  # who may search it; none: everybody
    # name and version of the embedding model that it is bound to; empty: that of its first text
    embedder: str = ""
    chunk_tokens: int = 0  # tokens of a passage at most, 0: the deployment's
    chunk_overlap: int = -1  # tokens that passages share with the one before, -1: the deployment's
    at_ms: int  # wall time


@frozen
class CollectionMade:
    """What a collection is on one shard, from its first document on; it outlives that document."""

    collection: str  # its name
    dim: int  # values of every vector
    shard: int  # counted from 0
    shards: int  # of how many
    at_ms: int  # wall time


@frozen
class CollectionState:
    """A collection as one retrieval worker holds it."""

    name: str  # the collection
    dim: int  # values of a vector
    metric: str  # sqeuclidean, inner_product or cosine
    documents: int  # documents of this shard
    # of known documents that searches for them did not find, in the last audit
    missed_share: float = 0.0
    passages: int = 0  # passages of documents that came as text
    # name and version of the embedding model that it is bound to, empty for none
    embedder: str = ""
    rows: int = 0  # rows of its index, deleted ones too
    dead_rows: int = 0  # of these, rows that are deleted and not compacted away yet
    loose_rows: int = 0  # of these, rows that have no edges yet, so every search scans them
    # memory of vectors, graph, codes, metadata and texts, with room for more rows
    bytes_held: int = 0
    recall: float = 0.0  # that its searches aim at, 0 for a routing list of a fixed length
    top_m: int = 0  # entries of the routing list of a search that names none, for its ten nearest


@frozen
class WireError:
    """An error as it travels; see schemas/errors.py for the tree."""

    code: str  # stable code of the error class
    message: str  # what was expected, what was found, and the subject's id
    retriable: bool = False  # whether the same request may succeed when tried again


@frozen
class StreamEnd:
    """The last word on one stream."""

    request_id: str  # the stream
    attempt: int  # which attempt
    seq: int  # how many tokens the answer has
    chars: int  # how many characters the answer has
    kind: OutcomeKind  # how it ended
    finish_reason: str = ""  # stop, length or tool_calls for a completed request
    stop_reason: str = ""  # the stop string or token that ended it
    error: WireError | None = None  # why it did not complete
    prompt_tokens: int = 0  # tokens in the prompt
    cached_tokens: int = 0  # prompt tokens found cached
    mode: Mode = Mode.NONE  # where prefill ran
    prefill_worker: str = ""  # who ran prefill
    decode_worker: str = ""  # who ran decode
    kv_bytes: int = 0  # bytes received over NIXL
    probes: int = 0  # searches while the answer was generated
    retrieved_tokens: int = 0  # tokens that they put into it
    stalled_ms: float = 0.0  # how long decoding stood still for them
    first_token_ms: int = 0  # wall time of the first token, 0 if there was none
    worker_ms: float = 0.0  # how long the worker that wrote it had the attempt
    deltas: Sequence[AnswerDelta] = ()  # what the end adds to a parsed answer
    reasoning_tokens: int = 0  # how many tokens of the answer are reasoning


@frozen
class Continued:
    """What the log holds of an answer whose attempt is void, for the next attempt to go on from; of
    several the first of an attempt counts.
    """

    request_id: str  # the request
    session_id: str  # its session
    attempt: int  # which is void
    # the answer so far, of this attempt and of those before it; ids as little-endian int32; empty:
    # the next attempt begins anew
    tokens: bytes = b""
    chars: int = 0  # characters that were delivered of it
    written_by: str  # the gateway that reads the answer, or the router where none said so in time
    at_ms: int  # wall time
    # the end of this attempt that the reader has taken all the same: the answer is over, whatever
    # was placed since
    end: StreamEnd | None = None


@frozen
class Estimate:
    """What a policy expected of the two ways to run a request."""

    ttft_local_ms: float = 0.0  # time to first token if the decode worker computes the prompt
    ttft_remote_ms: float = 0.0  # time to first token if a prefill worker does
    tpot_local_ms: float = 0.0  # time per output token on that decode worker meanwhile
    tpot_remote_ms: float = 0.0  # likewise
    # w_ttft * gain_ttft - w_tpot * loss_tpot + kv_price; above 0 speaks for local
    score: float = 0.0
    samples: int = 0  # observations behind it, the fewest of all parts
    gain_ttft: float = 0.0  # what local gains, as a share of the remote TTFT
    loss_tpot: float = 0.0  # what local loses, as a share of the remote TPOT
    kv_price: float = 0.0  # price of the KV that remote would move


@frozen
class Decision:
    """One decision of a router, with what it looked at."""

    request_id: str  # the request
    session_id: str  # its session
    attempt: int  # which attempt it starts or ends
    router_id: str  # who decided
    at_ms: int  # wall time, as given to the core
    kind: DecisionKind  # what was decided
    policy: str  # the policy's name
    reason: Reason  # why
    mode: Mode = Mode.NONE  # the placement's mode
    orchestration: Orchestration = Orchestration.NONE  # how it runs
    prefill_worker: str = ""  # chosen for prefill
    # in which life; tells a rebuild whether the worker still has the request
    prefill_epoch: int = 0
    decode_worker: str = ""  # chosen for decode
    decode_epoch: int = 0  # likewise for decode
    queue_length: int = 0  # requests waiting for admission on this router
    waited_ms: int = 0  # how long this one waited
    slack_ms: int = 0  # deadline minus now
    prompt_tokens: int = 0  # tokens in the prompt
    session_tokens: int = 0  # tokens of the session that its decode worker is thought to hold
    candidates: Sequence[Candidate] = ()  # the workers that were looked at
    w_ttft: float = 0.0  # weight of time to first token that applied
    w_tpot: float = 0.0  # weight of time per output token that applied
    load: float = 0.0  # requests under way per living worker of this router
    estimate: Estimate | None = None  # what the policy expected, where it estimates
    wished_policy: str = ""  # the policy that the request wished, where another one placed it
    # the orchestration that the request or the deployment wished, where it runs otherwise
    wished_orchestration: str = ""
    # why it is not as wished; where both are unmet, why it runs otherwise
    unmet: Unmet = Unmet.NONE
    # why its policy chose so, where `reason` says why it was asked, or overruled
    policy_reason: Reason = Reason.UNKNOWN


@frozen
class Document:
    """A document: its text, which is cut into passages and embedded here, or a ready vector; and
    its metadata.
    """

    document_id: str  # unique in its collection
    collection: str  # made by its first document, which fixes the dimension
    # float32, little-endian; empty where the text is embedded here, or if deleted
    vector: bytes = b""
    metadata: str = ""  # a JSON object that filters look at, empty for none
    deleted: bool = False  # whether it can no longer be found
    at_ms: int  # wall time
    text: str = ""  # what is cut into passages, embedded and cited; empty for a ready vector
    tenant: str = ""  # who alone may find it; empty: whoever may search the collection


@frozen
class DocumentPassages:
    """A document's passages, all in one record, so that they change together."""

    document_id: str  # unique in its collection
    collection: str  # of which collection
    tenant: str = ""  # who alone may find it; empty: whoever may search the collection
    metadata: str = ""  # a JSON object that filters look at, empty for none
    content_hash: str  # of the text and of how it was cut; the same again embeds nothing
    embedder: str  # name and version of the embedding model
    tokenizer: str = ""  # of the served model whose tokens stand with the passages, empty for none
    chunks: Sequence[Chunk]  # in order of the text
    documents_offset: int  # of the document in its partition of documents
    document_ms: int  # wall time of the document
    at_ms: int  # wall time


@frozen
class EmbedCapability:
    """What an embedding worker embeds with."""

    embedder: str  # name and version of the embedding model
    dim: int  # values of a vector
    tokens_max: int  # of a text; the rest of it is not seen
    # name of the model, if it is another than the deployment's first; empty: the first
    pool: str = ""


@frozen
class EmbedLoad:
    """What an embedding worker is doing now."""

    waiting: int = 0  # texts that wait
    queries_total: int = 0  # texts of retrievals and calls since start
    chunks_total: int = 0  # passages embedded since start
    documents_total: int = 0  # documents read since start
    unchanged_total: int = 0  # of these, those whose passages were there already
    ms_per_text: float = 0.0  # of the last batches


@frozen
class EmbedRequest:
    """Texts whose vectors somebody wants, as texts or as their tokens."""

    embed_id: str  # unique; a repeated record has the same
    asker_id: str  # the member that waits
    reply_partition: int  # of topic hits; leased by the asker
    texts: Sequence[str]  # what to embed
    deadline_ms: int  # wall time after which nobody waits
    tenant: str = ""  # in whose turn they are embedded
    # of each text, by the embedder's own tokenizer; where there are some, there are no texts
    token_ids: Sequence[Sequence[int]] = ()
    # name of the model, with or without its version; empty: the deployment's first
    embedder: str = ""


@frozen
class Embedded:
    """The vectors of texts, or why there are none."""

    embed_id: str  # which were asked for
    worker_id: str = ""  # who embedded
    embedder: str = ""  # name and version of the embedding model
    dim: int = 0  # values of each vector
    vectors: bytes = b""  # float32, little-endian, one after the other
    tokens: int = 0  # of all texts
    error: WireError | None = None  # why there are none
    at_ms: int  # wall time


@frozen
class Faults:
    """What a member cannot do at the moment, and what it could not read of the log."""

    failing: str = ""  # what fails, and why; empty: all works
    unreadable_total: int = 0  # records and batches that it could not read, in this process's life
    unreadable: str = ""  # the last of them: topic, partition, offset, and why


@frozen
class FileBatch:
    """Files that were put into a vector store by one call; each names it."""

    batch_id: str  # vsfb_...
    store_id: str  # in which vector store
    tenant: str = ""  # whose it is
    created_ms: int  # wall time
    cancelled: bool = False  # whether its caller gave it up


@frozen
class FilePart:
    """A piece of a file's bytes."""

    file_id: str  # of which file
    number: int  # from 0
    data: bytes  # what it holds


@frozen
class Grant:
    """How many requests one router may have on a worker."""

    router_id: str  # the router
    role: Role  # in which role
    credits: int  # most requests at once


@frozen
class Load:
    """What a member is doing now."""

    running: int = 0  # requests in the batch
    waiting: int = 0  # requests taken and not in the batch
    queued_tokens: int = 0  # prompt tokens not computed yet
    tokens_per_s: float = 0.0  # tokens generated, over the last seconds
    # prompt tokens computed per second of prefill, 0 while unknown
    prefill_tokens_per_s: float = 0.0
    step_ms: float = 0.0  # time per decode step, 0 while unknown
    kv_blocks_used: int = 0  # KV blocks in use
    kv_blocks_total: int = 0  # KV blocks in all
    kv_bytes_sent: int = 0  # bytes given over NIXL since start
    kv_bytes_received: int = 0  # bytes taken over NIXL since start
    requests_total: int = 0  # requests taken since start
    tokens_total: int = 0  # tokens generated since start
    # of decode time over the last seconds, waiting for retrievals; none where nothing asks
    stalled_share: float | None = None
    adapters: Sequence[str] = ()  # LoRA adapters that are loaded


@frozen
class SearchTally:
    """Retrievals of one class that a worker has answered since its start. Times are counted by the
    bounds of schemas/rules/buckets.py.
    """

    kind: str  # class: prefill or decode
    # how many ended so: completed, or the error's code
    outcomes: Mapping[str, int] = field(default_factory=dict)
    waits: Sequence[int] = ()  # waits for a slot, by bucket
    waited_ms: float = 0.0  # sum of these waits
    times: Sequence[int] = ()  # from reading a retrieval to its hits, by bucket
    took_ms: float = 0.0  # sum of these times


@frozen
class SearchLoad:
    """What a retrieval worker is doing now; waits are of the last seconds."""

    running: int = 0  # searches in slots
    parked: int = 0  # of these, searches that made way for urgent ones
    occupancy: float = 0.0  # running searches by slots
    waiting_prefill: int = 0  # searches in the prefill queue
    waiting_decode: int = 0  # searches in the decode queue
    ms_per_extend: float = 0.0  # time of one step of one search
    prefill_wait_ms_p50: float = 0.0  # median wait for a slot
    prefill_wait_ms_p95: float = 0.0  # 95th percentile
    decode_wait_ms_p50: float = 0.0  # median wait for a slot
    decode_wait_ms_p95: float = 0.0  # 95th percentile
    share: float = 0.0  # of free slots, reserved for prefill
    flush_ms: float = 0.0  # the longest that a prefill search waits before it takes a slot
    searches_total: int = 0  # retrievals answered since start, refused ones too
    misses_total: int = 0  # of these, those whose deadline had passed
    collections: Sequence[CollectionState] = ()  # what it holds
    behind: int = 0  # records of documents and passages that are not in its indexes yet
    tallies: Sequence[SearchTally] = ()  # retrievals answered since start, by class
    # since start, for which documents were not taken because rows had no edges yet
    held_back_ms: int = 0
    answering: float = 0.0  # retrievals taken and not answered, on average since the last heartbeat
    unread: int = 0  # retrievals on its partitions that it has not taken yet
    # by partition of documents: the offset before which all is in its indexes, or buried
    documents_done: Sequence[int] = ()
    passages_done: Sequence[int] = ()  # the same of passages
    partitions: Sequence[int] = ()  # of the topics of retrievals, that it answers


@frozen
class Heartbeat:
    """A member lives; the lease dies with it."""

    member_id: str  # the member
    epoch: int  # its life
    seq: int  # counts up
    at_ms: int  # wall time
    state: MemberState  # where it is in its life
    grants: Sequence[Grant] = ()  # a worker's credits, per router
    load: Load  # what it is doing
    search: SearchLoad | None = None  # for retrieval workers
    embedding: EmbedLoad | None = None  # of an embedding worker
    backlogs: Sequence[Backlog] = ()  # of a router, one for each model
    faults: Faults | None = None  # if it has any


@frozen
class Passage:
    """A passage as it was found: what is put into a prompt, and cited."""

    passage_id: str  # DOCUMENT#NUMBER, or the id of a document that came with a vector
    document_id: str  # its document
    text: str = ""  # what it says
    tokens: bytes = b""  # token ids of the served model as little-endian int32
    start: int = 0  # where it begins in the document's text, in characters
    title: str = ""  # from the document's metadata
    source: str = ""  # from the document's metadata, as a path or URL
    # cosine similarity to what was searched for; with words alone the fused score
    score: float = 0.0
    # DocumentPassages.content_hash of its document; empty for one that came with a vector
    content: str = ""


@frozen
class Hits:
    """What one shard found for a retrieval, nearest first, or why it found nothing."""

    retrieval_id: str  # the retrieval
    request_id: str  # the request that it serves, empty for none
    worker_id: str  # who searched
    shard: int  # which shard, from 0
    shards: int  # how many shards there are
    collection: str  # where it searched
    document_ids: Sequence[str] = ()  # the nearest documents
    distances: bytes = b""  # float32, little-endian, one for each document
    seeds: Sequence[str] = ()  # documents of the whole routing list, if they were wanted
    error: WireError | None = None  # why there are no hits
    exact: bool = False  # whether every document that may be found was looked at
    extends: int = 0  # steps of the search
    distances_computed: int = 0  # work of the search
    took_ms: float = 0.0  # between reading the retrieval and answering it
    at_ms: int  # wall time
    word_ids: Sequence[str] = ()  # the best by their words, if they were looked up
    word_scores: bytes = b""  # BM25, float32, little-endian, one for each of word_ids
    passages: Sequence[Passage] = ()  # of document_ids and word_ids, each once, if they were wanted
    wait_ms: float = 0.0  # before the search had a slot
    embedded_ms: float = 0.0  # as the retrieval tells
    mode: str = ""  # how a text was searched for: vector, words or hybrid; empty where a vector was
    # float32, little-endian, one for each of document_ids if a text was searched for by its vector
    cosines: bytes = b""
    word_cosines: bytes = b""  # likewise for each of word_ids
    # of the quoted documents that are this shard's, those that are gone, say something else, or are
    # not for this tenant
    changed: Sequence[str] = ()


@frozen
class Quoted:
    """A document as it was quoted, to be asked whether it still says that."""

    document_id: str  # unique in its collection
    content: str  # DocumentPassages.content_hash when it was quoted


@frozen
class Insert:
    """Tokens that were put into a prompt."""

    at: int  # index in the plain prompt_tokens before which they stand
    tokens: bytes  # token ids as little-endian int32
    quoted: Sequence[Quoted] = ()  # documents whose passages these are


@frozen
class JournalBatch:
    """What a router applied, in which order and at which time; columns of equal length, of which
    older batches lack the last three.
    """

    router_id: str  # the router
    router_epoch: int  # its life
    first_seq: int  # sequence number of the first line
    # topic of each applied record; tick, taken, ready, lost, passed_over and stopped are none
    topics: Sequence[str]
    partitions: Sequence[int]  # its partition
    offsets: Sequence[int]  # its offset
    now_ms: Sequence[int]  # the time given to the core
    # for records of fleet: the member's clock over the broker's, as measured then
    ahead_ms: Sequence[int] = ()
    # the record itself where its topic is compacted (fleet, outcomes, sessions), the request's id
    # where its usage was told; else empty
    values: Sequence[bytes] = ()
    effects: Sequence[int] = ()  # CRC-32 of what followed from it; 0 where nothing did


@frozen
class JournalSnapshot:
    """A router's state, in parts: where a replay of its journal can begin. The first is as its life
    begins.
    """

    router_id: str  # the router
    router_epoch: int  # its life
    seq: int  # sequence number of the first line that is not in the state
    at_ms: int  # wall time
    version: str  # what decided: the version of Trivium, and a checksum of its core
    settings: str  # section [router] of the settings, as JSON
    part: int = 0  # number of this part of the state, from 0
    parts: int = 1  # how many there are
    # this part of the state with all that it decides by; only the same version reads it
    # (streams/journal/snapshot.py)
    state: bytes = b""


@frozen
class KvEvents:
    """Which KV blocks a worker came to hold in its prefix cache, or lost, since its last batch."""

    worker_id: str  # whose cache
    epoch: int  # in which life
    seq: int  # number of the batch in this life, from 0; a gap means that some are lost
    at_ms: int  # wall time
    block_size: int  # tokens a block
    snapshot: bool = False  # all that the worker holds begins here: what was known before is void
    has_more: bool = False  # further batches of the same snapshot follow
    # hashes of blocks that are held now (schemas/prefix.py), little-endian unsigned 64-bit
    stored: bytes = b""
    removed: bytes = b""  # hashes of blocks that were evicted; applied before stored


@frozen
class KvHandle:
    """Where computed KV lies, and until when it may be read. Used once."""

    worker_id: str  # who holds the blocks
    worker_epoch: int  # the holder's epoch; a stale one is refused
    engine_id: str  # the holder's engine
    engine_request_id: str  # the request's id inside that engine
    tokens: int  # how many prompt tokens the blocks cover
    block_size: int  # tokens per block
    block_ids: Sequence[int] = ()  # the holder's blocks, in token order
    # wall time after which it must not be read; before the holder's own lease ends
    expires_at_ms: int
    params: bytes = b""  # the engine's own parameters, opaque to everyone but the engines


@frozen
class Lease:
    """A partition that belongs to one member."""

    topic: str  # topic name, without prefix
    partition: int  # the partition


@frozen
class Outcome:
    """A terminal record of an accepted request; that of the highest attempt counts."""

    request_id: str  # the request
    session_id: str  # its session
    # of which attempt; a router ends a request by one of its own. Of several outcomes the highest
    # counts
    attempt: int
    kind: OutcomeKind  # how it ended
    finish_reason: str = ""  # stop, length or tool_calls for a completed request
    error: WireError | None = None  # why it did not complete
    written_by: str  # the worker or router that ended it
    mode: Mode = Mode.NONE  # where prefill ran
    prefill_worker: str = ""  # who ran prefill
    decode_worker: str = ""  # who ran decode
    prompt_tokens: int = 0  # tokens in the prompt
    completion_tokens: int = 0  # tokens in the answer
    cached_tokens: int = 0  # prompt tokens found cached
    kv_bytes: int = 0  # bytes received over NIXL
    arrived_ms: int = 0  # wall time at the gateway
    first_token_ms: int = 0  # wall time of the first token, 0 if there was none
    ended_ms: int  # wall time of the end
    # where the whole conversation's KV may be read by the next turn's prefill, if the engine keeps
    # it
    kv: KvHandle | None = None
    orchestration: Orchestration = Orchestration.NONE  # how a remote placement ran
    probes: int = 0  # searches while the answer was generated
    retrieved_tokens: int = 0  # tokens that they put into it
    stalled_ms: float = 0.0  # how long decoding stood still for them
    worker_ms: float = 0.0  # how long the worker that wrote it had the attempt
    reasoning_tokens: int = 0  # how many tokens of the answer are reasoning


@frozen
class Parsing:
    """How a worker parses an answer into reasoning, content and tool calls."""

    tools: str = ""  # JSON list of the tools that the model may call, as in chats; empty: none
    # none, auto, required, or the JSON of the function that must be called
    tool_choice: str = "none"
    parallel_tool_calls: bool = True  # whether the answer may have several tool calls
    include_reasoning: bool = True  # whether the deltas have the reasoning
    template_kwargs: str = ""  # JSON object: the variables of the chat template; empty: none
    prior_calls: int = 0  # tool calls in the conversation before the answer


@frozen
class PendingTurn:
    """A response whose items are added to a conversation when it has ended with an answer."""

    conversation_id: str  # conv_...
    tenant: str = ""  # whose it is; nobody else sees it
    turn_id: str  # the one request that answers it
    created_ms: int  # wall time, later than the turns that the call saw
    deadline_ms: int  # wall time after which the answer is worthless
    partition: int  # of the call's record on responses
    offset: int  # of that record


@frozen
class Phase:
    """A finished step of a request on a worker."""

    request_id: str  # the request
    session_id: str  # its session
    attempt: int  # of which attempt
    router_id: str  # who dispatched
    worker_id: str  # who reports
    worker_epoch: int  # in which life
    kind: PhaseKind  # what finished
    started_ms: int  # wall time at which the step began
    ended_ms: int  # wall time at which it ended
    prompt_tokens: int = 0  # tokens in the prompt
    cached_tokens: int = 0  # prompt tokens found cached on this worker
    sent_tokens: int = 0  # tokens of the answer sent so far
    sent_chars: int = 0  # characters of the answer sent so far
    kv_bytes: int = 0  # bytes received over NIXL
    transfer_ms: float = 0.0  # how long the transfer took
    kv: KvHandle | None = None  # after prefill, where the KV lies
    error: WireError | None = None  # after refused and failed, why
    # bytes of a prefix that prefill of a pair read from decode before it computed
    kv_read_bytes: int = 0


@frozen
class Probing:
    """When an answer searches again while it is generated, and how what is found goes into it."""

    trigger: str = "every"  # every, sentence or uncertain: the name of a trigger
    every: int = 32  # tokens between two probes, at least
    lookahead: int = 8  # so many tokens before its place a probe is asked; 0: decoding waits for it
    probes_max: int = 8  # probes of one answer at most
    k: int = 1  # passages of one probe at most
    tokens_max: int = 0  # of all that probes put in; whole passages only
    min_score: float = -1.0  # what is less similar is left out
    # so long decoding waits at a probe's place at most; then it goes on without
    stall_ms: int = 200
    is_warm: bool = True  # whether a probe starts where the one before ended
    lead: bytes = b""  # tokens before the passages
    joint: bytes = b""  # tokens between two passages
    trail: bytes = b""  # tokens after the passages


@frozen
class Retrieval:
    """What a request wants to have found first, and where that goes in the prompt."""

    collection: str  # where to search
    query: str  # what to search for
    k: int  # passages at most
    mode: str = "hybrid"  # vector, words or hybrid
    filter: str = ""  # JSON expression over metadata, empty: all
    min_score: float = -1.0  # what is less similar is left out
    by_ms: int  # wall time until which the request waits for it; then it goes on without
    tokens_max: int  # of all passages together; whole passages only
    at: int  # index in prompt_tokens before which the passages go
    lead: bytes = b""  # tokens before the passages
    joint: bytes = b""  # tokens between two passages
    trail: bytes = b""  # tokens after the passages
    tail_at: int = 0  # index in prompt_tokens before which tail goes
    tail: bytes = b""  # tokens that stand further on, if something was found
    history_tokens: int = 0  # so many of prompt_tokens repeat earlier turns and their answers
    # so many may be put in altogether, so that what earlier turns had put in may come back; 0: it
    # may not
    room_tokens: int = 0
    probing: Probing | None = None  # how to search again while the answer is generated
    # token ids that no passage may have, as control tokens are, in pairs of the first and the last
    # of a range; a passage that has one is left out
    reserved: bytes = b""


@frozen
class Probes:
    """What a decode worker needs to search for an answer while it generates it, and what earlier
    attempts have put in.
    """

    retrieval: Retrieval  # the request's own: collection, query, mode, filter, and its probing
    tenant: str = ""  # for whom
    known_passages: Sequence[str] = ()  # passages that the prompt holds already
    # what earlier attempts have put in, one for each probe in their order, empty where nothing was;
    # at counts tokens of the answer
    inserts: Sequence[Insert] = ()
    decided: int = 0  # probes of earlier attempts: so many are not asked again


@frozen
class PromptMessage:
    """One message of a prompt."""

    role: str  # system, user, assistant or tool
    content: str  # what it says, or what a tool returned; empty if an answer was tool calls alone
    # JSON list: the tool calls of an assistant's message, as in chats
    tool_calls: str | None = None
    tool_call_id: str = ""  # of a tool's message: which call it answers
    reasoning: str = ""  # the reasoning of an assistant's message, for templates that repeat it


@frozen
class Prompt:
    """A question from a topic. Of text, messages and body one is given, unless the topic has a
    template.
    """

    text: str | None = None  # the question alone
    messages: Sequence[PromptMessage] = ()  # a conversation, its last message the question
    # a whole call of the OpenAI API as JSON; nothing else is given then but endpoint, deadline_ms,
    # priority and metadata
    body: str | None = None
    # of body: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages or /v1/embeddings;
    # empty: one of the first two, by its fields
    endpoint: str = ""
    model: str = ""  # empty: the deployment's; MODEL@COLLECTION looks things up
    session_id: str = ""  # of which conversation it is a turn; empty: of one of its own
    temperature: float | None = None  # as in the OpenAI API, like all that follow up to retrieval
    top_p: float | None = None  # the smallest share of likely tokens that is drawn from
    max_tokens: int | None = None  # tokens of the answer at most
    seed: int | None = None  # makes drawn tokens the same again
    stop: Sequence[str] = ()  # texts that end the answer
    response_format: str | None = None  # JSON: text, json_object, or json_schema with its schema
    tools: str | None = None  # JSON list: the tools that the model may call, as in chats
    # none, auto, required, or the JSON of the function that must be called
    tool_choice: str | None = None
    retrieval: str | None = None  # JSON: what is looked up first, as in chats
    priority: str = ""  # interactive, standard or batch; empty: the topic's
    deadline_ms: int | None = None  # ms from when it is asked; none: the topic's
    metadata: str | None = None  # a JSON object, which comes back with the answer


@frozen
class SearchCapability:
    """Which part of the collections a retrieval worker holds, and with what it searches."""

    shard: int  # from 0
    shards: int  # how many there are
    backend: str  # cpu or gpu
    slots: int  # searches at once
    place: str = ""  # where it runs, a node or a rack


@frozen
class Registration:
    """A member of the fleet introduces itself; written once per start and role change."""

    member_id: str  # stable name
    epoch: int  # rises with every start
    kind: MemberKind  # what it is
    roles: Sequence[Role] = ()  # which work a worker takes
    leases: Sequence[Lease] = ()  # the partitions that it claims
    host: str = ""  # where it runs
    pid: int = 0  # process id
    url: str = ""  # where it answers HTTP, if it does
    started_ms: int  # wall time; of a gateway, that of its process, in all its epochs
    capability: Capability | None = None  # for workers
    search: SearchCapability | None = None  # for retrieval workers
    embedding: EmbedCapability | None = None  # for embedding workers
    policies: Sequence[str] = ()  # of a router: by which it can place; none: not told


@frozen
class Structured:
    """A constraint on the form of the answer."""

    kind: StructuredKind  # which kind of constraint
    # the JSON schema, regular expression, grammar, JSON list of choices, or JSON of the structural
    # tag; empty for json_object
    value: str


@frozen
class Sampling:
    """How tokens are drawn and when generation stops; every field has a value, so engines never
    guess defaults.
    """

    max_tokens: int  # most tokens to generate, at least 1
    min_tokens: int = 0  # fewest tokens before a stop is honoured
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # nucleus mass, in (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # least probability relative to the likeliest token
    # set by the gateway where the client gave none, so that an answer can be recomputed
    seed: int | None = None
    presence_penalty: float = 0.0  # in [-2, 2]
    frequency_penalty: float = 0.0  # in [-2, 2]
    repetition_penalty: float = 1.0  # above 0
    stop: Sequence[str] = ()  # strings that end the answer
    stop_token_ids: Sequence[int] = ()  # tokens that end the answer
    include_stop: bool = False  # keep the stop string in the answer
    ignore_eos: bool = False  # go on past the end-of-sequence token
    skip_special_tokens: bool = True  # leave special tokens out of the text
    logprobs: int | None = None  # how many top log-probabilities per token; null is none at all
    # bias by token id, written in decimal
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()  # words that must not be generated
    structured: Structured | None = None  # form of the answer
    allowed_token_ids: Sequence[int] = ()  # the only tokens that may be generated; empty: all
    # most tokens of reasoning, after which its end is generated; null: no bound of its own
    thinking_token_budget: int | None = None


@frozen
class Request:
    """One accepted chat or completion call."""

    request_id: str  # unique; one per choice
    parent_id: str  # the id that the client knows; equal for all choices of one call
    choice: int = 0  # index of the choice
    session_id: str  # the conversation; partition key of everything about it
    turn: int = 0  # how many answers the conversation held before
    endpoint: Endpoint  # chat or completion
    priority: Priority  # priority class
    tenant: str = ""  # whose key was used
    model: str  # served model name
    prompt_tokens: bytes  # token ids as little-endian int32
    sampling: Sampling  # how to generate
    arrived_ms: int  # wall time at the gateway
    deadline_ms: int  # wall time after which the answer is worthless
    gateway_id: str  # who streams the answer
    gateway_partition: int  # partition of tokens that this gateway leases
    w_ttft: float = -1.0  # weight of time to first token in placement; below 0: the deployment's
    w_tpot: float = -1.0  # weight of time per output token in placement; below 0: the deployment's
    policy: str = ""  # the policy that is to place it; empty: the deployment's
    # how it is to run where it is placed remotely: auto or an orchestration; empty: as the
    # deployment wants
    orchestration: str = ""
    # which process of that gateway, as its registrations tell; 0: not told, and never taken for
    # lost
    gateway_started_ms: int = 0
    keeps_running: bool = False  # goes on when nobody reads the answer
    retrieval: Retrieval | None = None  # what is to be found first
    # whose prefix caches it shares: prompts of one scope alone may have blocks in common; empty: of
    # all that name none
    cache_scope: str = ""
    parsing: Parsing | None = None  # how the answer is parsed; null: it is text
    adapter: str = ""  # the LoRA adapter over the model, by name; empty: none


@frozen
class ResponseDeleted:
    """A stored response that is to be known no more."""

    request_id: str  # the response's request
    at_ms: int  # wall time


@frozen
class Resumption:
    """A client reads the answer of a request at another gateway than before."""

    request_id: str  # the request
    session_id: str  # its session
    gateway_id: str  # who streams the rest
    gateway_started_ms: int  # which process of that gateway, as its registrations tell
    at_ms: int  # wall time


@frozen
class RetrievalRequest:
    """One vector search, for every shard of a collection."""

    retrieval_id: str  # unique; a repeated record has the same
    request_id: str  # the request that it serves, empty for none
    asker_id: str  # the member that waits for the hits
    reply_partition: int  # of topic hits; leased by the asker
    collection: str  # where to search
    vector: bytes  # float32, little-endian, as many as the collection's dimension
    k: int  # documents wanted, at least 1
    top_m: int = 0  # length of the routing list, 0: the worker's default
    width: int = 0  # entries expanded per extend, 0: the worker's default
    # extends without a change of the routing list after which the search stops, 0: the worker's
    # default
    patience: int = 0
    filter: str = ""  # JSON expression over metadata, empty: all documents
    seeds: Sequence[str] = ()  # document ids that an earlier probe ended with, from all shards
    wants_seeds: bool = False  # whether the hits are to carry seeds for the next probe
    asked_ms: int  # wall time
    deadline_ms: int  # wall time after which nobody waits
    # what is searched for, in words; the embedding pool makes its vector, and words are looked up
    text: str = ""
    mode: str = ""  # vector, words or hybrid, or check: only of quoted is told; empty: vector
    urgency: str = ""  # prefill or decode: where the embedding pool hands it on; empty: prefill
    min_score: float = -1.0  # what is less similar than that is not found; a cosine from -1
    wants_passages: bool = False  # whether the hits are to carry texts and tokens
    tenant: str = ""  # for whom; empty: for the operator, who may see everything
    embedded_ms: float = 0.0  # between reading it and handing it on at the embedding pool
    # name and version of the embedding model that made the vector, or that is to make it; empty:
    # the asker brought it, or the collection decides
    embedder: str = ""
    # documents of the collection of which the asker wants to know whether they changed
    quoted: Sequence[Quoted] = ()


@frozen
class Retrieved:
    """What was found for a request, or why nothing was; of several the first counts."""

    request_id: str  # the request
    session_id: str  # its session
    router_id: str  # who asked
    passages: Sequence[Passage] = ()  # the best first
    error: WireError | None = None  # why nothing was found
    shards: int = 0  # how many there are
    missing: Sequence[int] = ()  # shards that did not answer in time
    extends: int = 0  # steps of the longest search
    distances_computed: int = 0  # work of all shards
    embedded_ms: float = 0.0  # at the embedding pool
    wait_ms: float = 0.0  # the longest wait for a slot
    took_ms: float = 0.0  # at the slowest shard
    asked_ms: int  # wall time
    at_ms: int  # wall time
    history: Sequence[Insert] = ()  # what earlier turns had put in, in the order of at
    mode: str = ""  # how it was searched for: vector, words or hybrid
    degraded: str = ""  # why by words alone, though not wished so
    attempt: int = 0  # of which attempt; 0: found before the first
    probe: int = 0  # which probe of the answer, from 1; 0: for the prompt
    seq: int = 0  # of a probe: before which token of the answer it is put in
    tokens: bytes = b""  # of a probe: what is put in, empty for nothing
    # of a probe: how long decoding stood still for it, until it was written
    stalled_ms: float = 0.0
    # documents quoted in history that have changed since; what quotes them is left out
    changed: Sequence[str] = ()
    # passages that were found and had no room: in this record, or, of a probe, in the answer
    left_out: int = 0


@frozen
class Session:
    """What a router remembers of a conversation."""

    session_id: str  # the conversation
    decode_worker: str  # who decoded its last turn
    worker_epoch: int  # in which life
    context_tokens: int  # tokens of prompt and answer after the last turn
    turns: int  # completed turns
    last_used_ms: int  # wall time of the last turn's end
    kv: KvHandle | None = None  # where its KV may be read, if the engine keeps it for that
    tenant: str = ""  # whose conversation it is; another tenant may use the same id
    # whose KV it is: the name of the model or adapter that answered; empty: not told
    model: str = ""


@frozen
class StoreFile:
    """What callers want of a file in a vector store; StoreFileResult says what has come of it."""

    store_id: str  # in which vector store
    file_id: str  # which file
    tenant: str = ""  # whose they are
    attributes: str = ""  # a JSON object that filters look at, empty for none
    batch_id: str = ""  # of the file batch that it came with, empty for none
    target_state: str  # present, cancelled or deleted
    revision: int  # from 1, one more with each change
    created_ms: int  # wall time


@frozen
class StoreFileResult:
    """What has come of a file in a vector store; written by the gateway that makes documents of
    files.
    """

    store_id: str  # in which vector store
    file_id: str  # which file
    tenant: str = ""  # whose they are
    revision: int  # of the StoreFile that it answers; an older one's says nothing of a newer
    status: str  # in_progress, completed or failed
    documents: int = 0  # how many documents it is on the log, at most
    usage_bytes: int = 0  # of its text
    error_code: str = ""  # server_error, unsupported_file or invalid_file; empty for none
    error: str = ""  # what was expected and found
    at_ms: int  # wall time


@frozen
class StoreUsed:
    """When a vector store was last used."""

    store_id: str  # which
    tenant: str = ""  # whose it is
    at_ms: int  # wall time


@frozen
class StoredConversation:
    """A conversation that a caller keeps; its items have their own records."""

    conversation_id: str  # conv_...
    tenant: str = ""  # whose it is; nobody else sees it
    metadata: str = ""  # a JSON object of texts, empty for none
    created_ms: int  # wall time


@frozen
class StoredFile:
    """A file that a caller has uploaded; its bytes are parts on files."""

    file_id: str  # file-...
    tenant: str = ""  # whose it is; nobody else sees it
    filename: str  # its last part, without folders
    purpose: str  # as OpenAI names them: assistants, user_data
    bytes: int  # of its content
    created_ms: int  # wall time
    expires_ms: int = 0  # wall time after which it is deleted, 0: never
    state: str  # uploading, stored, or deleted: its parts are going
    partition: int = 0  # of files, where all its parts are
    parts: Sequence[int] = ()  # offsets of its parts, in order; while it is uploaded as many zeros


@frozen
class StoredItem:
    """An item of a conversation: a message, a tool call, its result, or reasoning."""

    conversation_id: str  # conv_...
    tenant: str = ""  # whose it is; nobody else sees it
    turn_id: str  # what it was added with: the request of a response, or a call that adds items
    number: int  # among the items of its turn, from 0
    item_id: str  # its name for callers
    created_ms: int  # of its turn, by which turns are ordered
    item: str  # JSON, as callers see it


@frozen
class StoredResponse:
    """A call of /v1/responses as any gateway can tell of it and go on from it; its answer is what
    the log has of its tokens.
    """

    request_id: str  # the one request that answers it
    session_id: str  # the conversation
    tenant: str = ""  # whose key was used
    created_ms: int  # wall time at the gateway
    deadline_ms: int  # wall time after which the answer is worthless
    token_partition: int  # partition of tokens on which the answer comes
    token_offset: int  # from where on
    query: str = ""  # what was searched for first, empty: nothing
    options: str  # JSON: what the answer repeats of the call
    include: Sequence[str] = ()  # what the answer is to have besides
    input: str  # JSON: the items that the call brought
    history: str  # JSON: the messages before them, without instructions


@frozen
class StreamDeltas:
    """The deltas of consecutive tokens of one parsed stream; its rows have no text."""

    request_id: str  # the stream
    attempt: int  # which attempt
    first_seq: int  # number of the first token of its row
    deltas: Sequence[AnswerDelta]  # in the order of the tokens


@frozen
class TopLogprob:
    """One of the likeliest tokens."""

    token_id: int  # the token
    token: str  # its text
    logprob: float  # natural logarithm of its probability


@frozen
class TokenLogprob:
    """The log-probability of a generated token and of its rivals."""

    token_id: int  # the token
    token: str  # its text
    logprob: float  # natural logarithm of its probability
    top: Sequence[TopLogprob] = ()  # the likeliest tokens at this place


@frozen
class StreamLogprobs:
    """Log-probabilities of consecutive tokens of one stream."""

    request_id: str  # the stream
    attempt: int  # which attempt
    first_seq: int  # number of the first token
    tokens: Sequence[TokenLogprob]  # one per token


@frozen
class StreamRetrieved:
    """What was put into a stream's prompt, told by its router, or into its answer, told by its
    worker.
    """

    request_id: str  # the stream
    collection: str  # where it was searched
    citations: Sequence[Citation] = ()  # in order of the prompt
    tokens: int = 0  # put into the prompt
    missing_shards: int = 0  # that did not answer in time
    error: WireError | None = None  # why the answer goes on without
    probe: int = 0  # which probe of the answer, from 1; 0: for the prompt
    seq: int = 0  # of a probe: before which token of the answer it was put in
    degraded: str = ""  # why by words alone, though not wished so
    left_out: int = 0  # passages that were found and had no room


@frozen
class StreamStart:
    """How and where a stream is run, told once with its first token."""

    request_id: str  # the stream
    attempt: int  # its attempt
    mode: Mode = Mode.NONE  # the placement's mode
    orchestration: Orchestration = Orchestration.NONE  # how a remote placement runs
    prefill_worker: str = ""  # who computes the prompt
    decode_worker: str = ""  # who generates; empty while it is not chosen


@frozen
class StreamVoid:
    """An attempt was given up: tokens of it that come after this word are not delivered."""

    request_id: str  # the stream
    attempt: int  # this one, and all before it
    # whether readers are to say what they have, for the next attempt to go on from; who has the end
    # says so anyway
    asks: bool = True


@frozen
class TokenFrame:
    """New tokens of all streams of one gateway after one engine step; columns of equal length, one
    row per stream.
    """

    worker_id: str  # who computed them
    at_ms: int  # wall time
    request_ids: Sequence[str]  # the stream of each row
    attempts: Sequence[int]  # its attempt
    first_seqs: Sequence[int]  # number of the row's first token, from 0
    first_chars: Sequence[int]  # characters of the answer before this row
    token_counts: Sequence[int]  # how many of token_ids belong to the row
    token_ids: Sequence[int]  # all rows' tokens, one after the other
    # the row's text; may lag its tokens while a character or a stop string is incomplete
    texts: Sequence[str]
    logprobs: Sequence[StreamLogprobs] = ()  # for streams that asked for them
    ends: Sequence[StreamEnd] = ()  # streams that end with this frame
    starts: Sequence[StreamStart] = ()  # streams that begin with this frame
    retrieved: Sequence[StreamRetrieved] = ()  # what was found for streams that begin soon
    # attempts that were given up; a router asks so what there is of their answers
    voids: Sequence[StreamVoid] = ()
    deltas: Sequence[StreamDeltas] = ()  # for streams whose answers are parsed


@frozen
class TurnBatch:
    """Answers that ended: what the next turns of their conversations begin with, for clients that
    name no session; columns of equal length.
    """

    gateway_id: str  # who answered
    at_ms: int  # wall time
    digests: Sequence[bytes]  # of all that was said, the answer included
    session_ids: Sequence[str]  # the conversations


@frozen
class Usage:
    """What one request has used, however it ended; one record each, numbered without gaps in its
    partition.
    """

    number: int  # from 0, one more than the record before it
    request_id: str  # the request
    parent_id: str  # its call
    choice: int = 0  # which choice of its call, each with the whole prompt
    session_id: str  # its session
    tenant: str = ""  # whose it is
    priority: Priority = Priority.STANDARD  # its class
    endpoint: Endpoint = Endpoint.CHAT  # through which it came
    model: str = ""  # who was asked
    kind: OutcomeKind  # how it ended
    attempt: int = 0  # of which attempt the outcome is that counts
    # tokens that the model was to read: the prompt, and what searches put into the answer
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, found in a cache
    retrieved_tokens: int = 0  # of these, looked up
    completion_tokens: int = 0  # tokens in the answer
    worker_ms: float = 0.0  # how long workers had it, together, as far as they have told
    arrived_ms: int = 0  # wall time at the gateway
    ended_ms: int = 0  # wall time of the end
    reasoning_tokens: int = 0  # how many tokens of the answer are reasoning


@frozen
class VectorStore:
    """What callers say of a vector store; it is the collection of that name."""

    store_id: str  # vs_..., which names its collection, too
    tenant: str = ""  # whose it is; nobody else sees or searches it
    name: str = ""  # as its owner calls it
    description: str = ""  # in its owner's words
    metadata: str = ""  # a JSON object of texts, empty for none
    created_ms: int  # wall time
    expires_days: int = 0  # days after its last use after which it is emptied, 0: never
    chunk_tokens: int = 0  # tokens of a passage at most, 0: the deployment's
    chunk_overlap: int = -1  # tokens that passages share with the one before, -1: the deployment's
    deleted: bool = False  # whether it is gone for callers, and its documents are going


@frozen
class WantedPool:
    """How many workers a pool wants."""

    role: Role  # which pool
    present: int  # workers that it has
    workers: int  # workers that it wants
    work: float  # what comes and what waits, as workers that are busy all the time
    why: str  # what decided it
    model: str = ""  # of which model; empty: not told, or a pool of no model


@frozen
class Wanted:
    """How many workers each pool wants, from what waits and what comes."""

    written_by: str  # who worked it out
    at_ms: int  # wall time
    pools: Sequence[WantedPool]  # one each


@frozen
class WarmPrefix:
    """Tokens with which a prompt will begin, for a worker to compute while the rest is searched
    for. Nobody waits for it, and nothing answers it.
    """

    request_id: str  # the request
    session_id: str  # its session
    worker_id: str  # for whom
    worker_epoch: int  # for which life of that worker
    model: str  # served model name
    prompt_tokens: bytes  # token ids as little-endian int32
    deadline_ms: int  # wall time after which it is of no use
    # whose prefix caches it shares: prompts of one scope alone may have blocks in common; empty: of
    # all that name none
    cache_scope: str = ""
    adapter: str = ""  # the LoRA adapter over the model, by name; empty: none


@frozen
class Work:
    """One phase of a request, for one worker."""

    request_id: str  # the request
    session_id: str  # its session
    attempt: int  # how often the request was placed, from 1; a higher attempt voids lower ones
    router_id: str  # who dispatched, and whose credit is spent
    worker_id: str  # for whom
    worker_epoch: int  # for which life of that worker; another one refuses
    phase: WorkPhase  # what to run
    mode: Mode  # the placement's mode
    orchestration: Orchestration  # how a remote placement runs
    model: str  # served model name
    prompt_tokens: bytes  # token ids as little-endian int32
    sampling: Sampling  # how to generate
    arrived_ms: int  # wall time at the gateway
    deadline_ms: int  # wall time after which the answer is worthless
    gateway_partition: int  # partition of tokens for the answer
    prefill_worker: str = ""  # who ran prefill, for the outcome
    first_token_ms: int = 0  # when the first token was sent, 0 if it was not
    first_seq: int = 0  # tokens before this one were already sent by the prefill worker
    first_char: int = 0  # characters before this one were already sent by the prefill worker
    cached_tokens: int = 0  # prompt tokens that prefill found cached
    kv: KvHandle | None = None  # KV to fetch; null computes the prompt in place
    dispatched_ms: int  # wall time at the router
    # for prefill in decode_first and concurrent: the blocks of the decode worker to write into; its
    # tokens are valid there already; without block ids the decode worker sends them over NIXL
    kv_target: KvHandle | None = None
    probes: Probes | None = None  # for decode: how to search again while the answer is generated
    # how many of prompt_tokens, the last ones, are the answer's that earlier attempts have sent;
    # this one goes on behind them
    prior_tokens: int = 0
    prior_chars: int = 0  # characters of the answer that they have sent
    # whose prefix caches it shares: prompts of one scope alone may have blocks in common; empty: of
    # all that name none
    cache_scope: str = ""
    parsing: Parsing | None = None  # how the answer is parsed; null: it is text
    adapter: str = ""  # the LoRA adapter over the model, by name; empty: none

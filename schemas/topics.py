"""The table of all topics; `streams/log/admin.py` creates and checks them.

Records whose key is a request are still on their session's partition if the table says so: the
owner of a partition owns all state of its sessions, and compaction keeps one record per key.
"""

import zlib

from schemas.errors import RecordError
from schemas.records import Role
from schemas.topic import DAY_MS, HOUR_MS, Topic

# Rebuilds of live requests read these, so they must keep records longer than a request may live.
REBUILT_FROM = ("requests", "cancellations", "phases", "outcomes", "decisions")
# Compacted soon for readers of whole topics: replaced records are removed after ten minutes.
_SOON = {
    "segment.ms": "600000",
    "delete.retention.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
}

TOPICS: dict[str, Topic] = {
    topic.name: topic
    for topic in (
        Topic(
            name="requests",
            records=("Request",),
            written_by=("gateway",),
            read_by=("router",),
            doc="Accepted requests, from gateways to routers.",
        ),
        Topic(
            name="cancellations",
            records=("Cancellation", "Resumption"),
            written_by=("gateway",),
            read_by=("router",),
            doc="Requests given up, and those resumed at another gateway, to routers.",
        ),
        Topic(
            name="prefill",
            records=("Work", "CancelWork", "AssignRoles", "WarmPrefix"),
            key="request",
            group="worker",
            written_by=("router", "anyone"),
            read_by=("worker",),
            doc="Work for prefill workers; one leases each partition.",
        ),
        Topic(
            name="decode",
            records=("Work", "CancelWork", "AssignRoles", "WarmPrefix"),
            key="request",
            group="worker",
            written_by=("router", "anyone"),
            read_by=("worker",),
            doc="Work for decode and replica workers; one leases each partition.",
        ),
        Topic(
            name="phases",
            records=("Phase", "Retrieved", "Continued"),
            written_by=("worker", "router", "gateway"),
            read_by=("router",),
            doc="Finished steps, from workers to routers; what was found; work that was not sent; "
            "how much there is of an answer whose attempt was given up.",
        ),
        Topic(
            name="tokens",
            records=("TokenFrame",),
            key="gateway",
            group="gateway",
            written_by=("worker", "router"),
            read_by=("gateway",),
            doc="Tokens to the gateway that leases the partition.",
        ),
        Topic(
            name="outcomes",
            records=("Outcome",),
            key="attempt",
            written_by=("worker", "router"),
            read_by=("router",),
            cleanup="compact,delete",
            doc="How accepted requests ended; of several, that of the highest attempt counts.",
        ),
        Topic(
            name="decisions",
            records=("Decision",),
            written_by=("router",),
            read_by=("anyone",),
            retention_ms=7 * DAY_MS,
            doc="Why each request went where it went.",
        ),
        Topic(
            name="decisions.shadow",
            records=("Decision",),
            written_by=("router",),
            read_by=("anyone",),
            retention_ms=7 * DAY_MS,
            doc="Where shadow routers would have placed what others did; nobody acts on it.",
        ),
        Topic(
            name="journal",
            records=("JournalBatch", "JournalSnapshot"),
            key="router",
            group="single",
            written_by=("router",),
            read_by=("replay",),
            doc="What each router applied, when, in which order; where a replay can begin.",
        ),
        Topic(
            name="sessions",
            records=("Session",),
            written_by=("router",),
            read_by=("router",),
            cleanup="compact,delete",
            config=_SOON,
            doc="What routers remember of conversations.",
        ),
        Topic(
            name="prompts",
            records=("Prompt",),
            key="any",
            group="prompt",
            written_by=("anyone",),
            read_by=("bridge",),
            retention_ms=7 * DAY_MS,
            doc="Questions from anywhere, as records or plain JSON; each gets one answer.",
        ),
        Topic(
            name="answers",
            records=("Answer",),
            key="any",
            group="prompt",
            written_by=("bridge",),
            read_by=("anyone",),
            retention_ms=7 * DAY_MS,
            doc="One answer to each prompt, under its key, on the partition of the same number.",
        ),
        Topic(
            name="answers.parts",
            records=("AnswerPart",),
            key="any",
            group="prompt",
            written_by=("bridge",),
            read_by=("anyone",),
            doc="Answers while they are generated, where a topic of prompts asks for that.",
        ),
        Topic(
            name="batch.prompts",
            records=("Prompt",),
            key="line",
            group="prompt",
            written_by=("gateway",),
            read_by=("bridge",),
            retention_ms=7 * DAY_MS,
            doc="Lines of batches, in the order of their files.",
        ),
        Topic(
            name="batch.answers",
            records=("Answer",),
            key="line",
            group="prompt",
            written_by=("bridge",),
            read_by=("gateway",),
            retention_ms=7 * DAY_MS,
            doc="Answers to lines of batches, until their gateway puts them into files.",
        ),
        Topic(
            name="usage",
            records=("Usage",),
            key="request",
            written_by=("router",),
            read_by=("router", "anyone"),
            retention_ms=30 * DAY_MS,
            doc="What each request has used, once each, numbered without gaps by partition.",
        ),
        Topic(
            name="turns",
            records=("TurnBatch",),
            key="gateway",
            group="single",
            written_by=("gateway",),
            read_by=("gateway",),
            doc="By which words conversations go on, for clients without session ids.",
        ),
        Topic(
            name="objects",
            records=(
                *("StoredFile", "VectorStore", "StoreUsed"),
                *("StoreFile", "StoreFileResult", "FileBatch"),
                *("Batch", "BatchProgress"),
            ),
            key="object",
            group="single",
            written_by=("gateway",),
            read_by=("gateway",),
            cleanup="compact",
            config=_SOON,
            doc="What callers keep: files, vector stores, batches; read whole by every gateway.",
        ),
        Topic(
            name="files",
            records=("FilePart",),
            key="part",
            group="document",
            written_by=("gateway",),
            read_by=("gateway",),
            scales_with="gateways",
            cleanup="compact",
            doc="Bytes of files, in parts that objects tell the offsets of; kept until deleted.",
        ),
        Topic(
            name="responses",
            records=("StoredResponse",),
            key="request",
            written_by=("gateway",),
            read_by=("gateway",),
            cleanup="compact,delete",
            config=_SOON,
            doc="Calls of /v1/responses; ids tell their offsets, an empty value deletes.",
        ),
        Topic(
            name="responses.deleted",
            records=("ResponseDeleted",),
            key="request",
            group="single",
            written_by=("gateway",),
            read_by=("gateway",),
            doc="Responses that were deleted; read whole by every gateway.",
        ),
        Topic(
            name="fleet",
            records=("Registration", "Heartbeat", "Wanted"),
            key="member",
            group="single",
            written_by=("worker", "gateway", "router", "anyone"),
            read_by=("worker", "gateway", "router"),
            cleanup="compact",
            config={**_SOON, "message.timestamp.type": "LogAppendTime"},
            doc="Who is there, with leases, credits and load, and who is wanted; read whole.",
        ),
        Topic(
            name="prefixes",
            records=("KvEvents",),
            key="worker",
            group="single",
            written_by=("worker",),
            read_by=("router",),
            doc="What the workers' prefix caches hold; read whole by every router.",
        ),
        Topic(
            name="retrieval.prefill",
            records=("RetrievalRequest",),
            key="retrieval",
            group="retrieval",
            written_by=("router", "anyone"),
            read_by=("worker",),
            retention_ms=HOUR_MS,
            doc="Urgent searches, once per request; every shard's group reads all of them.",
        ),
        Topic(
            name="retrieval.decode",
            records=("RetrievalRequest",),
            key="retrieval",
            group="retrieval",
            written_by=("worker", "anyone"),
            read_by=("worker",),
            retention_ms=HOUR_MS,
            doc="Probes while decoding; every shard's group reads all of them.",
        ),
        Topic(
            name="embeddings",
            records=("RetrievalRequest", "EmbedRequest"),
            key="retrieval",
            group="retrieval",
            written_by=("router", "gateway", "worker", "anyone"),
            read_by=("worker",),
            scales_with="embedding workers",
            retention_ms=HOUR_MS,
            doc="Searches whose text wants a vector first, and texts whose vectors are wanted.",
        ),
        Topic(
            name="hits",
            records=("Hits", "Embedded"),
            key="request",
            group="asker",
            written_by=("worker",),
            read_by=("router", "worker", "gateway", "anyone"),
            retention_ms=HOUR_MS,
            doc="What shards found, and vectors of texts, to the asker that leases the partition.",
        ),
        Topic(
            name="documents",
            records=("Document", "CollectionMade", "CollectionDeclared"),
            key="document",
            group="document",
            written_by=("anyone", "worker"),
            read_by=("worker",),
            cleanup="compact",
            doc="What can be found, the truth behind every index; an empty value deletes.",
        ),
        Topic(
            name="passages",
            records=("DocumentPassages",),
            key="document",
            group="document",
            written_by=("worker",),
            read_by=("worker",),
            cleanup="compact",
            doc="Documents' texts, cut and embedded; on the document's partition, under its key.",
        ),
    )
}

# Topics of work by a worker's role; each worker leases a partition.
WORK_TOPICS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.REPLICA: "decode"}

DEAD_LETTER_SUFFIX = ".dlq"  # such a topic has the retention of the original topic
DEAD_LETTER_HEADERS = "x-dlq-"  # prefix of headers with error and origin
RETRIED = "retried"  # header of a mark: the offset of the retried letter on the same partition
SENT_AGAIN = "sent-again"  # header of a retried record: its number of retries


def live_ms_max() -> int:
    """Return the longest life of a request, in ms, such that takeovers still find its records."""
    return min(TOPICS[name].retention_ms for name in REBUILT_FROM) - HOUR_MS


def partition_of(key: str, partition_count: int) -> int:
    """Return the partition of a session: CRC-32 of the UTF-8 key, the same in every process."""
    return zlib.crc32(key.encode()) % partition_count


def document_key(collection: str, document_id: str) -> str:
    """Return the record key of a document; a collection's name has no slash."""
    return f"{collection}/{document_id}"


def collection_key(collection: str, shard: int, shards: int) -> str:
    """Return the record key of a collection's shard; no document's key begins with a slash."""
    return f"/{shard}/{shards}/{collection}"


def declaration_key(collection: str) -> str:
    """Return the record key of an operator's settings of a collection."""
    return f"//{collection}"


def object_key(tenant: str, *names: str) -> str:
    """Return the record key of a caller's stored object: its id, after its parents' ids."""
    return "/".join((tenant, *names))


def check_record(topic: str, record: object) -> None:
    """Raise RecordError unless the table allows the record on the topic."""
    name = type(record).__name__
    if name not in TOPICS[topic].records:
        raise RecordError(
            f"topic {topic} carries {' or '.join(TOPICS[topic].records)}, found {name}"
        )

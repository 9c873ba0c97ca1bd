"""The table of all topics; `streams/log/admin.py` creates and checks them.

Records whose key is a request are still on their session's partition if the table says so: the
owner of a partition owns all state of its sessions, and compaction keeps one record per key.
"""

import zlib
from dataclasses import dataclass, field

from schemas.errors import RecordError
from schemas.records import Role

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
_LEASED = ("worker", "gateway", "asker")
# Processes that work in parallel, at most one for each partition of the group.
_SCALES = {
    "session": "routers",
    "worker": "workers of the role",
    "gateway": "gateways",
    "asker": "members that search",
    "prompt": "bridges",
    "retrieval": "copies of a shard",
    "document": "embedding workers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One row of the table.

    `key` names the record key; `group` names the partition count that topics share
    (`LogSettings.partitions`), and so what chooses the partition. `written_by` and `read_by` name
    kinds of processes; `anyone` means any client, and `replay` only observes.
    """

    name: str
    records: tuple[str, ...]
    key: str = "session"
    group: str = "session"
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    scales_with: str = ""  # if it differs from the group's
    retention_ms: int = DAY_MS
    cleanup: str = "delete"
    config: dict[str, str] = field(default_factory=dict)
    doc: str

    def subject(self, record: str) -> str:
        """Return the subject of the record's schemas in a schema registry.

        If the topic has one kind of record, Kafka's default, which other clients find without
        configuration (TopicNameStrategy); else one subject each (TopicRecordNameStrategy).
        """
        return f"{self.name}-value" if len(self.records) == 1 else f"{self.name}-trivium.{record}"

    @property
    def scales(self) -> str:
        """Return the kind of process that works on it in parallel, one for each partition; empty if
        all readers read the whole topic."""
        return self.scales_with or _SCALES.get(self.group, "")

    @property
    def retention(self) -> str:
        """Return in words for how long the topic keeps records."""
        hours = self.retention_ms // HOUR_MS
        time = f"{hours} h" if hours <= 24 else f"{hours // 24} days"
        last = "the last of each key"
        return {"delete": time, "compact": last}.get(self.cleanup, f"{last}, {time}")

    @property
    def partition_by(self) -> str:
        """Return what chooses the partition: `lease` if members lease one each, else the group."""
        return "lease" if self.group in _LEASED else self.group


# Rebuilds of live requests read these, so they must keep records longer than a request may live.
REBUILT_FROM = ("requests", "cancellations", "phases", "outcomes", "decisions")
# Brokers remove replaced records after ten minutes, because processes read these topics in full.
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
            doc="Requests that a gateway has accepted, for routers.",
        ),
        Topic(
            name="cancellations",
            records=("Cancellation", "Resumption"),
            written_by=("gateway",),
            read_by=("router",),
            doc="Cancellations, and notices that another gateway resumed an answer, for routers.",
        ),
        Topic(
            name="prefill",
            records=("Work", "CancelWork", "AssignRoles", "WarmPrefix"),
            key="request",
            group="worker",
            written_by=("router", "anyone"),
            read_by=("worker",),
            doc="Work for prefill workers; each worker leases one partition.",
        ),
        Topic(
            name="decode",
            records=("Work", "CancelWork", "AssignRoles", "WarmPrefix"),
            key="request",
            group="worker",
            written_by=("router", "anyone"),
            read_by=("worker",),
            doc="Work for decode and replica workers; each worker leases one partition.",
        ),
        Topic(
            name="phases",
            records=("Phase", "Retrieved", "Continued"),
            written_by=("worker", "router", "gateway"),
            read_by=("router",),
            doc="Finished steps of requests; results of searches; work that could not be sent; how "
            "far the answer of a void attempt got.",
        ),
        Topic(
            name="tokens",
            records=("TokenFrame",),
            key="gateway",
            group="gateway",
            written_by=("worker", "router"),
            read_by=("gateway",),
            doc="Generated tokens, for the gateway that leases the partition.",
        ),
        Topic(
            name="outcomes",
            records=("Outcome",),
            key="attempt",
            written_by=("worker", "router"),
            read_by=("router",),
            cleanup="compact,delete",
            doc="The final record of each attempt; that of a request's highest attempt counts.",
        ),
        Topic(
            name="decisions",
            records=("Decision",),
            written_by=("router",),
            read_by=("anyone",),
            retention_ms=7 * DAY_MS,
            doc="What routers decided about each request, and why.",
        ),
        Topic(
            name="decisions.shadow",
            records=("Decision",),
            written_by=("router",),
            read_by=("anyone",),
            retention_ms=7 * DAY_MS,
            doc="What shadow routers would have decided; no process acts on it.",
        ),
        Topic(
            name="journal",
            records=("JournalBatch", "JournalSnapshot"),
            key="router",
            group="single",
            written_by=("router",),
            read_by=("replay",),
            doc="The events that each router applied, and snapshots at which a replay can begin.",
        ),
        Topic(
            name="sessions",
            records=("Session",),
            written_by=("router",),
            read_by=("router",),
            cleanup="compact,delete",
            config=_SOON,
            doc="The routers' state of each session.",
        ),
        Topic(
            name="prompts",
            records=("Prompt",),
            key="any",
            group="prompt",
            written_by=("anyone",),
            read_by=("bridge",),
            retention_ms=7 * DAY_MS,
            doc="Prompts from any producer, as records or plain JSON; each gets one answer.",
        ),
        Topic(
            name="answers",
            records=("Answer",),
            key="any",
            group="prompt",
            written_by=("bridge",),
            read_by=("anyone",),
            retention_ms=7 * DAY_MS,
            doc="One answer to each prompt, under the prompt's key and on its partition number.",
        ),
        Topic(
            name="answers.parts",
            records=("AnswerPart",),
            key="any",
            group="prompt",
            written_by=("bridge",),
            read_by=("anyone",),
            doc="Parts of answers while they are generated, if the topic pair has them on.",
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
            doc="Answers to lines of batches, until a gateway has written them to files.",
        ),
        Topic(
            name="usage",
            records=("Usage",),
            key="request",
            written_by=("router",),
            read_by=("router", "anyone"),
            retention_ms=30 * DAY_MS,
            doc="One record of each ended request: its tokens and worker time. Each partition "
            "numbers its records without gaps.",
        ),
        Topic(
            name="turns",
            records=("TurnBatch",),
            key="gateway",
            group="single",
            written_by=("gateway",),
            read_by=("gateway",),
            doc="Hashes by which gateways find the session of a client that sends no session id.",
        ),
        Topic(
            name="objects",
            records=(
                *("StoredFile", "VectorStore", "StoreUsed"),
                *("StoreFile", "StoreFileResult", "FileBatch"),
                *("Batch", "BatchProgress"),
                *("StoredConversation", "StoredItem", "PendingTurn"),
            ),
            key="object",
            group="single",
            written_by=("gateway",),
            read_by=("gateway",),
            cleanup="compact",
            config=_SOON,
            doc="The callers' files, vector stores, batches and conversations; every gateway reads "
            "all of it.",
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
            doc="The bytes of files, in parts; records on `objects` have their offsets.",
        ),
        Topic(
            name="responses",
            records=("StoredResponse",),
            key="request",
            written_by=("gateway",),
            read_by=("gateway",),
            cleanup="compact,delete",
            config=_SOON,
            doc="Calls of /v1/responses; a response's id has its offset; an empty value deletes.",
        ),
        Topic(
            name="responses.deleted",
            records=("ResponseDeleted",),
            key="request",
            group="single",
            written_by=("gateway",),
            read_by=("gateway",),
            doc="Ids of deleted responses; every gateway reads the whole topic.",
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
            doc="Registrations, heartbeats and scaling targets; every member reads all of it.",
        ),
        Topic(
            name="prefixes",
            records=("KvEvents",),
            key="worker",
            group="single",
            written_by=("worker",),
            read_by=("router",),
            doc="Changes of the workers' prefix caches; every router reads the whole topic.",
        ),
        Topic(
            name="retrieval.prefill",
            records=("RetrievalRequest",),
            key="retrieval",
            group="retrieval",
            written_by=("router", "anyone"),
            read_by=("worker",),
            retention_ms=HOUR_MS,
            doc="Searches before the prompt is computed; each shard's group reads all of them.",
        ),
        Topic(
            name="retrieval.decode",
            records=("RetrievalRequest",),
            key="retrieval",
            group="retrieval",
            written_by=("worker", "anyone"),
            read_by=("worker",),
            retention_ms=HOUR_MS,
            doc="Searches during an answer; each shard's group reads all of them.",
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
            doc="Searches whose text needs a vector first, and texts to embed.",
        ),
        Topic(
            name="hits",
            records=("Hits", "Embedded"),
            key="request",
            group="asker",
            written_by=("worker",),
            read_by=("router", "worker", "gateway", "anyone"),
            retention_ms=HOUR_MS,
            doc="Hits of shards, and vectors of texts, for the client that leases the partition.",
        ),
        Topic(
            name="documents",
            records=("Document", "CollectionMade", "CollectionDeclared"),
            key="document",
            group="document",
            written_by=("anyone", "worker"),
            read_by=("worker",),
            cleanup="compact",
            doc="Documents and collections; all indexes are built from it; an empty value deletes.",
        ),
        Topic(
            name="passages",
            records=("DocumentPassages",),
            key="document",
            group="document",
            written_by=("worker",),
            read_by=("worker",),
            cleanup="compact",
            doc="Passages of documents, with vectors; key and partition are the document's.",
        ),
    )
}

# Topics of work by a worker's role; each worker leases a partition.
WORK_TOPICS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.REPLICA: "decode"}

# Dead-letter topics keep records for `retention_ms` of their topic: for a day if that topic is
# compacted only, and keeps its own records for ever.
DEAD_LETTER_SUFFIX = ".dlq"
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


def collection_of(key: str) -> str:
    """Return the collection of a document by the key of its records."""
    return key.partition("/")[0]


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

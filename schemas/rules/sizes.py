"""How large what crosses the log may be: the one size rule, and who keeps it.

Theory of operation. The broker takes no record above RECORD_BYTES_MAX, whoever sends it. Frames and
journal batches are split by their writers; a request cannot be split, and its work repeats it, with
a KV handle that some phase or outcome brought, and the answer behind which it goes on. So requests
leave room for the largest report and answer, and for the tokens that may be put into their prompts,
and whatever names, headers and error a record
has besides fits into REST_BYTES_MAX. Then no record that follows from one that was let in can be
too large. Hits repeat the names of their retrieval, which are bounded alike. `LogProducer.send`
keeps the rule for what leaves a process, and whoever reads from others keeps it again. To decode a
record of many empty items takes 0.2 to 0.6 s per MB, and nobody else's turn comes meanwhile; so
`Codec.decode` refuses by their bytes alone the kinds that many read and that are never large.
Nothing here does I/O.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, get_type_hints

from schemas.errors import RecordTooLarge
from schemas.records import (
    AssignRoles,
    Cancellation,
    CancelWork,
    Continued,
    DocumentPassages,
    EmbedRequest,
    Heartbeat,
    Hits,
    Outcome,
    Passage,
    Phase,
    Probing,
    Registration,
    Request,
    Resumption,
    Retrieval,
    RetrievalRequest,
    Retrieved,
    Wanted,
    Work,
)

RECORD_BYTES_MAX = 8 << 20  # of a record with its headers; `max.message.bytes` of every topic
REPORT_BYTES_MAX = 1 << 20  # of a phase or an outcome, most of which is its KV handle
REST_BYTES_MAX = 64 << 10
PRIOR_BYTES_MAX = 256 << 10  # of an answer's tokens, that a later attempt goes on behind
REQUEST_BYTES_MAX = RECORD_BYTES_MAX - REPORT_BYTES_MAX - PRIOR_BYTES_MAX - REST_BYTES_MAX
FRAME_BYTES_MAX = 1 << 20  # of tokens, split by `workers/llm/frames.py`; one row may be larger
JOURNAL_LINES_MAX = 10_000  # of a batch; with topics' names of 249 characters, the longest, 3 MB
JOURNAL_BYTES_MAX = 1 << 20  # of records in a batch, and of a part of a snapshot
FLEET_BYTES_MAX = 256 << 10  # of a member's words, most of which are its collections
RETRIEVAL_BYTES_MAX = 512 << 10  # of a retrieval, or of its hits
NAME_CHARS_MAX = 1_024  # of each id and name in a record about a request, a handle's worker too
COLLECTION_CHARS_MAX = 128  # of its name
SHARDS_MAX = 1_024  # of the documents
DIM_MAX = 65_536  # values of a document's vector
SEEDS_MAX = 4_096  # of a retrieval
QUOTED_MAX = 1_024  # documents of which a retrieval asks whether they changed
TEXTS_MAX = 2_048  # of one call for embeddings
DOCUMENT_CHARS_MAX = 512 << 10  # of a document's text
CHUNKS_MAX = 4_096  # passages of a document
PASSAGES_MAX = 64  # of one answer to a retrieval, and in one prompt
PROBES_MAX = 64  # of one answer
TRIGGER_CHARS_MAX = 64  # of the name of what asks for them
PASSAGE_BYTES_MAX = 512 << 10  # of all passages that were found for a request
HISTORY_BYTES_MAX = 256 << 10  # of the tokens that earlier turns of its session had put in
PROBED_BYTES_MAX = 256 << 10  # of what probes put into one answer, with texts and names
_PASSAGE_BYTES = 64  # of one, beside its texts and tokens

_BYTES_MAX: dict[type, int] = {
    Request: REQUEST_BYTES_MAX,
    Phase: REPORT_BYTES_MAX,
    Outcome: REPORT_BYTES_MAX,
    Registration: FLEET_BYTES_MAX,
    Heartbeat: FLEET_BYTES_MAX,
    Wanted: FLEET_BYTES_MAX,
    RetrievalRequest: RETRIEVAL_BYTES_MAX,
    Hits: RETRIEVAL_BYTES_MAX,
    EmbedRequest: RETRIEVAL_BYTES_MAX,
    Retrieved: REPORT_BYTES_MAX,
    Continued: PRIOR_BYTES_MAX + REST_BYTES_MAX,
    DocumentPassages: RECORD_BYTES_MAX,
    AssignRoles: REST_BYTES_MAX,
}
_UNREAD = {
    kind.__name__: _BYTES_MAX[kind]
    for kind in (Registration, Heartbeat, Wanted, RetrievalRequest, Hits, AssignRoles)
}


def check_bytes(kind: str, record_bytes: int) -> None:
    """Raise RecordTooLarge for a record that is not worth to be decoded."""
    limit = _UNREAD.get(kind, RECORD_BYTES_MAX)
    if record_bytes > limit:
        raise RecordTooLarge(f"{kind}: expected at most {limit} bytes, found {record_bytes}")


def check_size(record: Any, record_bytes: int) -> None:
    """Raise RecordTooLarge unless a record of so many bytes, and all that follows from it, fits."""
    kind = type(record)
    if kind is Request and record.retrieval is not None:
        record_bytes += _put_in_bytes(record.retrieval)
    limit = _BYTES_MAX.get(kind, RECORD_BYTES_MAX)
    if record_bytes > limit:
        subject = getattr(record, "request_id", "")[:64]
        raise RecordTooLarge(
            f"{kind.__name__} {subject}: expected at most {limit} bytes, found {record_bytes}; "
            "shorten the prompt, its schema or its lists"
        )
    names = _NAMES.get(kind)
    if names is None:
        return
    longest = max(map(len, names(record)))
    for handle in (getattr(record, "kv", None), getattr(record, "kv_target", None)):
        if handle is not None:  # outcomes repeat its worker
            longest = max(longest, len(handle.worker_id))
    if longest > NAME_CHARS_MAX:
        raise RecordTooLarge(f"{kind.__name__}: expected names of at most {NAME_CHARS_MAX} chars")


def is_collection(name: str) -> bool:
    """Whether a collection may have that name: keys of documents have a slash behind it."""
    return 0 < len(name) <= COLLECTION_CHARS_MAX and "/" not in name


def _put_in_bytes(retrieval: Retrieval) -> int:
    """By how much its work may grow at most; lead, trail and tail are in the record already."""
    joints = min(retrieval.k, PASSAGES_MAX) * len(retrieval.joint)
    before = max(0, 4 * retrieval.tokens_max + joints, 4 * retrieval.room_tokens)
    return before + (_probe_bytes(retrieval.probing) if retrieval.probing else 0)


def _probe_bytes(probing: Probing) -> int:
    """What probes put into an answer at most; a later attempt's work repeats it."""
    k, probe_count = min(probing.k, PASSAGES_MAX), min(probing.probes_max, PROBES_MAX)
    around = len(probing.lead) + k * len(probing.joint) + len(probing.trail)
    return 4 * probing.tokens_max + probe_count * around


def fit_passages(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    """The best, as long as a record has room for all of them."""
    bytes_left, best_passages = PASSAGE_BYTES_MAX, []
    for passage in passages:
        names = (passage.text, passage.passage_id, passage.document_id)
        sizes = (len(text.encode()) for text in (*names, passage.title, passage.source))
        bytes_left -= sum(sizes) + len(passage.tokens) + _PASSAGE_BYTES
        if bytes_left < 0:
            break
        best_passages.append(passage)
    return tuple(best_passages)


def _names(kind: type[Any]) -> Callable[[Any], tuple[str, ...]]:
    """All fields of a kind of record that are strings; there are several in each."""
    texts = [name for name, hint in get_type_hints(kind).items() if hint is str]
    return attrgetter(*texts)


_ABOUT_REQUESTS = (
    *(Request, Cancellation, Resumption, Retrieved, Continued),
    *(Work, CancelWork, Phase, Outcome),
)
_NAMES: dict[type, Callable[[Any], tuple[str, ...]]] = {
    kind: _names(kind) for kind in _ABOUT_REQUESTS
}
_NAMES[RetrievalRequest] = attrgetter("retrieval_id", "request_id", "asker_id", "collection")

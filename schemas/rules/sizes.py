"""The size limits of records in the log, and the checks of writers and readers.

Theory of operation. The broker refuses records above RECORD_BYTES_MAX from every client. Writers
split frames and journal batches; a request cannot be split, and its work repeats it, with a KV
handle of a phase or outcome, and the prior answer that it continues. So requests leave space for
the largest report and answer, and for the tokens that may be inserted into their prompts, and all
other names, headers and errors of a record fit into REST_BYTES_MAX. Then no record that follows
from an accepted one can be too large. Hits repeat the names of their retrieval, which are bounded
likewise. A frame has at least one row or end of an answer, whose deltas are bounded, and further
ones as long as they fit. `LogProducer.send` checks records that leave a process, and readers of
other processes' records check again. Decoding a record of many empty items takes 0.2 to 0.6 s per
MB, and blocks the event loop; so `Codec.decode` refuses, by their bytes alone, kinds that have many
readers and are never large. Nothing here does I/O.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, get_type_hints

from schemas.errors import RecordTooLarge
from schemas.records import (
    AnswerDelta,
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
PRIOR_BYTES_MAX = 256 << 10  # of an answer's tokens that a later attempt continues
REQUEST_BYTES_MAX = RECORD_BYTES_MAX - REPORT_BYTES_MAX - PRIOR_BYTES_MAX - REST_BYTES_MAX
FRAME_BYTES_MAX = 1 << 20  # of a token frame; `workers/llm/frames.py` splits; a row may be larger
DELTAS_BYTES_MAX = 2 << 20  # of what one output of an engine, or the end, adds to a parsed answer
JOURNAL_LINES_MAX = 10_000  # of a batch; with topics' names of 249 characters, the longest, 3 MB
JOURNAL_BYTES_MAX = 1 << 20  # of records in a batch, and of a part of a snapshot
FLEET_BYTES_MAX = 256 << 10  # of a member's record, most of which is its collections
RETRIEVAL_BYTES_MAX = 512 << 10  # of a retrieval, or of its hits
NAME_CHARS_MAX = 1_024  # of each id and name in a record about a request, a handle's worker too
COLLECTION_CHARS_MAX = 128  # of a collection's name
SHARDS_MAX = 1_024  # of the retrieval index
DIM_MAX = 65_536  # values of a document's vector
SEEDS_MAX = 4_096  # seeds of a retrieval
QUOTED_MAX = 1_024  # quoted documents that a retrieval checks for changes
TEXTS_MAX = 2_048  # of one call for embeddings
DOCUMENT_CHARS_MAX = 512 << 10  # of a document's text
CHUNKS_MAX = 4_096  # passages of a document
PASSAGES_MAX = 64  # of one answer to a retrieval, and in one prompt
PROBES_MAX = 64  # probes of one answer
TRIGGER_CHARS_MAX = 64  # of a probe trigger's name
PASSAGE_BYTES_MAX = 512 << 10  # of all retrieved passages of a request
HISTORY_BYTES_MAX = 256 << 10  # of the inserts of earlier turns of a session
PROBED_BYTES_MAX = 256 << 10  # of the results of probes in one answer, with texts and names
_PASSAGE_BYTES = 64  # overhead of a passage, besides its texts and tokens

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
    """Raise RecordTooLarge for a record that is too large to decode."""
    limit = _UNREAD.get(kind, RECORD_BYTES_MAX)
    if record_bytes > limit:
        raise RecordTooLarge(f"{kind}: expected at most {limit} bytes, found {record_bytes}")


def check_size(record: Any, record_bytes: int) -> None:
    """Raise RecordTooLarge unless a record of `record_bytes`, and all that follow from it, fit."""
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


def check_deltas(request_id: str, deltas: Sequence[AnswerDelta]) -> None:
    """Raise RecordTooLarge for deltas that fit into no frame: one frame has all of a token's."""
    chars = sum([len(delta.text) + len(delta.name) for delta in deltas])
    if chars <= DELTAS_BYTES_MAX // 4:  # nearly always; a character has at most 4 bytes
        return
    delta_bytes = sum([len((delta.text + delta.name).encode()) for delta in deltas])
    if delta_bytes > DELTAS_BYTES_MAX:
        raise RecordTooLarge(
            f"request {request_id[:64]}: expected at most {DELTAS_BYTES_MAX} bytes of a tool call "
            f"at once, found {delta_bytes}; ask for shorter arguments"
        )


def is_collection(name: str) -> bool:
    """Return whether a collection may have that name: keys of documents have a slash after it."""
    return 0 < len(name) <= COLLECTION_CHARS_MAX and "/" not in name


def _put_in_bytes(retrieval: Retrieval) -> int:
    """Return the most bytes by which its work may grow; lead, trail and tail are in the record."""
    joints = min(retrieval.k, PASSAGES_MAX) * len(retrieval.joint)
    before = max(0, 4 * retrieval.tokens_max + joints, 4 * retrieval.room_tokens)
    return before + (_probe_bytes(retrieval.probing) if retrieval.probing else 0)


def _probe_bytes(probing: Probing) -> int:
    """Return the most bytes that probes insert into an answer; a later attempt repeats them."""
    k, probe_count = min(probing.k, PASSAGES_MAX), min(probing.probes_max, PROBES_MAX)
    around = len(probing.lead) + k * len(probing.joint) + len(probing.trail)
    return 4 * probing.tokens_max + probe_count * around


def fit_passages(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    """Return the best passages that fit together into a record."""
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
    """Return a getter of all string fields of a kind of record; each kind has several."""
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

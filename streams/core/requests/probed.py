"""What searches during an answer have come to, kept so that a later attempt makes the same answer.

A decode worker writes what became of each probe to the log before any token after it leaves, and
only then. A request's probes are a fold over those records alone, so a rebuild has the live ones:
they are numbered without a gap from 1, the first record of an attempt counts for each number, and
an attempt that writes one voids what lower attempts had from that number on, since it was not told
of that. What a lower attempt writes after that means nothing. What is more than the bounds let in
is not kept, nor is what comes after it: a later attempt asks for that itself.

Pure; `streams/core/requests/live.py` keeps them, `streams/core/handlers/orders.py` hands them on.
"""

from schemas.frozen import frozen
from schemas.records import Insert, Probes, Request, Retrieved, StreamRetrieved
from schemas.rules.citations import told_of_probe
from schemas.rules.sizes import PROBED_BYTES_MAX, PROBES_MAX

_PROBE_BYTES = 64  # beside tokens, texts and names


@frozen
class Probed:
    """What became of one probe; `told` is what the reader hears where something was put in."""

    attempt: int
    seq: int
    tokens: bytes = b""
    told: StreamRetrieved | None = None
    cost_bytes: int = _PROBE_BYTES


def with_probe(
    kept: tuple[Probed, ...], request: Request, retrieved: Retrieved
) -> tuple[Probed, ...]:
    """The request's probes once one more record was read."""
    place, attempt = retrieved.probe - 1, retrieved.attempt
    probing = None if request.retrieval is None else request.retrieval.probing
    if probing is None or place >= min(probing.probes_max, PROBES_MAX):
        return kept
    if not 0 <= place <= len(kept) or (kept and attempt < kept[-1].attempt):
        return kept
    if place < len(kept) and kept[place].attempt == attempt:
        return kept
    found = (*kept[:place], _probed(request, retrieved))
    return found if sum(each.cost_bytes for each in found) <= PROBED_BYTES_MAX else kept[:place]


def _probed(request: Request, retrieved: Retrieved) -> Probed:
    if not retrieved.tokens:
        return Probed(attempt=retrieved.attempt, seq=retrieved.seq)
    assert request.retrieval is not None
    told = told_of_probe(retrieved, request.retrieval.collection)
    texts = (
        text
        for each in told.citations
        for text in (each.text, each.passage_id, each.document_id, each.title, each.source)
    )
    cost_bytes = _PROBE_BYTES + len(retrieved.tokens) + sum(len(text.encode()) for text in texts)
    return Probed(
        attempt=retrieved.attempt,
        seq=retrieved.seq,
        tokens=retrieved.tokens,
        told=told,
        cost_bytes=cost_bytes,
    )


def probes_of(
    request: Request, known: tuple[str, ...], probed: tuple[Probed, ...]
) -> Probes | None:
    """What a decode worker needs to search for the answer, and to make again what was made."""
    retrieval = request.retrieval
    if retrieval is None or retrieval.probing is None:
        return None
    told = [each.told for each in probed if each.told is not None]
    put_in = [cited.passage_id for each in told for cited in each.citations]
    return Probes(
        retrieval=retrieval,
        tenant=request.tenant,
        known=(*known, *put_in),
        put_in=tuple(Insert(at=each.seq, tokens=each.tokens) for each in probed),
        decided=len(probed),
    )

"""Keeps the results of searches during an answer, so that a later attempt makes the same answer.

A decode worker writes the result of each probe to the log before it sends any token after it. A
request's probes are a fold over those records alone, so a rebuild has the same ones: they are
numbered without a gap from 1, the first record of an attempt counts for each number, and an attempt
that writes one voids the results of lower attempts from that number on, because it did not get
those. Later records of lower attempts are ignored. A result beyond the bounds is dropped with all
after it: a later attempt searches for those itself.

Pure; `streams/core/requests/live.py` keeps the results, `streams/core/handlers/orders.py` sends
them to workers.
"""

from schemas.frozen import frozen
from schemas.records import Insert, Probes, Request, Retrieved, StreamRetrieved
from schemas.rules.citations import probe_notice
from schemas.rules.sizes import PROBED_BYTES_MAX, PROBES_MAX

_PROBE_BYTES = 64  # overhead of a result, besides its tokens, texts and names


@frozen
class ProbeResult:
    """The result of one probe; `notice` is for the reader, if the probe inserted passages."""

    attempt: int
    seq: int
    tokens: bytes = b""
    notice: StreamRetrieved | None = None
    cost_bytes: int = _PROBE_BYTES


def with_probe(
    probed: tuple[ProbeResult, ...], request: Request, retrieved: Retrieved
) -> tuple[ProbeResult, ...]:
    """Return the request's probe results after one more record."""
    place, attempt = retrieved.probe - 1, retrieved.attempt
    probing = None if request.retrieval is None else request.retrieval.probing
    if probing is None or place >= min(probing.probes_max, PROBES_MAX):
        return probed
    if not 0 <= place <= len(probed) or (probed and attempt < probed[-1].attempt):
        return probed
    if place < len(probed) and probed[place].attempt == attempt:
        return probed
    probes = (*probed[:place], _probed(request, retrieved))
    return (
        probes if sum(probe.cost_bytes for probe in probes) <= PROBED_BYTES_MAX else probed[:place]
    )


def _probed(request: Request, retrieved: Retrieved) -> ProbeResult:
    if not retrieved.tokens:
        return ProbeResult(attempt=retrieved.attempt, seq=retrieved.seq)
    assert request.retrieval is not None
    notice = probe_notice(retrieved, request.retrieval.collection)
    texts = (
        text
        for citation in notice.citations
        for text in (
            citation.text,
            citation.passage_id,
            citation.document_id,
            citation.title,
            citation.source,
        )
    )
    cost_bytes = _PROBE_BYTES + len(retrieved.tokens) + sum(len(text.encode()) for text in texts)
    return ProbeResult(
        attempt=retrieved.attempt,
        seq=retrieved.seq,
        tokens=retrieved.tokens,
        notice=notice,
        cost_bytes=cost_bytes,
    )


def probes_of(
    request: Request, passage_ids: tuple[str, ...], probed: tuple[ProbeResult, ...]
) -> Probes | None:
    """Return what a decode worker needs to search during the answer and to repeat the results of
    earlier attempts; None if the request has no probing."""
    retrieval = request.retrieval
    if retrieval is None or retrieval.probing is None:
        return None
    notices = [probe.notice for probe in probed if probe.notice is not None]
    put_in = [cited.passage_id for notice in notices for cited in notice.citations]
    return Probes(
        retrieval=retrieval,
        tenant=request.tenant,
        known_passages=(*passage_ids, *put_in),
        inserts=tuple(Insert(at=probe.seq, tokens=probe.tokens) for probe in probed),
        decided=len(probed),
    )

"""Describes the searches in a request's story: the one for its prompt, and its answer's probes.

For each search: what it found, and which passages were inserted. Free of I/O; the steps of the
story use it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from schemas.codec import to_dict
from schemas.records import Passage, Probes, Request, Retrieval, Retrieved, WarmPrefix
from schemas.rules.tokens import token_count
from streams.core.requests.context import PromptContext, quoted_in, with_context

_QUERY_CHARS = 60


def wish(retrieval: Retrieval, arrived_ms: int) -> str:
    """Return what a request asks to find, for the step that accepts it."""
    by_ms, probing = retrieval.by_ms - arrived_ms, retrieval.probing
    suffix = "" if probing is None else f", and at most {probing.probes_max} probes while answering"
    return f", wants {retrieval.k} passages of {retrieval.collection} by {by_ms} ms{suffix}"


def outcome(retrieved: Retrieved) -> str:
    """Return the result of a search, in one line."""
    if retrieved.error is not None:
        return f"continues without passages: {retrieved.error.message} ({retrieved.error.code})"
    count = len(retrieved.passages)
    passages = "1 passage" if count == 1 else f"{count or 'no'} passages"
    how = f" ({retrieved.mode})" if retrieved.mode else ""
    return f"found {passages}{how}, {retrieved.at_ms - retrieved.asked_ms} ms after asking"


def details(
    request: Request, retrieved: Retrieved, late_count: int, warms: Sequence[WarmPrefix] = ()
) -> tuple[str, ...]:
    """Return details: the search, its passages with those in the prompt marked, the tokens
    inserted, and what was to be computed meanwhile.
    """
    if request.retrieval is None:
        return ()
    context = with_context(request, retrieved)
    return (
        *_search(request.retrieval, retrieved),
        *_passages(retrieved, context),
        *_put_in(context),
        *_left_out(retrieved),
        *(
            f"{warm.worker_id} was told to compute the first {token_count(warm.prompt_tokens)} "
            "tokens meanwhile"
            for warm in warms
        ),
        *([f"{late_count} later results had no effect"] if late_count else []),
    )


def probe_step(retrieved: Retrieved) -> tuple[str, tuple[str, ...]]:
    """Return the result of a probe: one line, and its details."""
    tokens, where = token_count(retrieved.tokens), f"before token {retrieved.seq}"
    if tokens:
        what = f"{tokens} tokens inserted {where}"
    elif retrieved.error is not None:
        error = retrieved.error
        what = f"{where}: continues without passages: {error.message} ({error.code})"
    else:
        what = f"nothing new {where}"
    stalled_ms = retrieved.stalled_ms
    stood = f"decoding paused for {stalled_ms:.1f} ms" if stalled_ms else "decoding continued"
    passages = [_passage_line("→", passage) for passage in retrieved.passages]
    details = (*([_shards_line(retrieved)] * bool(retrieved.shards)), stood, *passages)
    return f"probe {retrieved.probe}, {what}", details


def wish_value(retrieval: Retrieval) -> dict[str, Any]:
    """Return a retrieval for JSON, with counts in place of tokens."""
    fields: dict[str, Any] = _with_counts(to_dict(retrieval))
    return fields


def retrieved_value(retrieved: Retrieved) -> dict[str, Any]:
    """Return a search result for JSON, with counts in place of tokens."""
    history = [[insert.at, token_count(insert.tokens)] for insert in retrieved.history]
    return {**_with_counts(to_dict(retrieved)), "history": history}


def _with_counts(value: Any) -> Any:
    """Return a value of records with counts in place of tokens, at any depth."""
    if isinstance(value, bytes):
        return token_count(value)
    if isinstance(value, dict):
        return {name: _with_counts(inner) for name, inner in value.items()}
    return [_with_counts(inner) for inner in value] if isinstance(value, list | tuple) else value


def probes_value(probes: Probes) -> dict[str, Any]:
    """Return the probes that decode work carries, without the fields of the request."""
    fields: dict[str, Any] = _with_counts(to_dict(probes))
    del fields["retrieval"]
    return fields


def _search(retrieval: Retrieval, retrieved: Retrieved) -> Iterator[str]:
    query = " ".join(retrieval.query.split())
    short = query if len(query) <= _QUERY_CHARS else f"{query[: _QUERY_CHARS - 3]}..."
    yield f"searched {retrieval.collection} for: {short}"
    if retrieved.degraded:
        yield f"by its words alone: {retrieved.degraded}"
    if not retrieved.shards:
        return
    yield _shards_line(retrieved)
    if retrieved.missing:
        yield f"without shards {', '.join(map(str, retrieved.missing))}, which did not answer"


def _shards_line(retrieved: Retrieved) -> str:
    answered = retrieved.shards - len(retrieved.missing)
    return (
        f"embedded in {retrieved.embedded_ms:.1f} ms; {answered} of {retrieved.shards} shards in "
        f"{retrieved.took_ms:.1f} ms, of that {retrieved.wait_ms:.1f} ms waited for a slot; "
        f"{retrieved.extends} extends, {retrieved.distances_computed:,} distances"
    )


def _passages(retrieved: Retrieved, context: PromptContext) -> Iterator[str]:
    cited = {citation.passage_id for citation in context.notice.citations}
    for passage in retrieved.passages:
        mark = "→" if passage.passage_id in cited else " "
        yield _passage_line(mark, passage, "" if passage.passage_id in cited else ", not inserted")


def _passage_line(mark: str, passage: Passage, note: str = "") -> str:
    title = f", {passage.title}" if passage.title else ""
    return (
        f"{mark} {passage.passage_id}{title}: score {passage.score:.3f}, "
        f"{token_count(passage.tokens)} tokens{note}"
    )


def _left_out(retrieved: Retrieved) -> Iterator[str]:
    """Yield what earlier turns quoted and this prompt does not."""
    quoted = {quote.document_id for quote in quoted_in(retrieved.history)}
    if retrieved.error is not None and quoted:
        count = len(quoted)
        yield f"what earlier turns quoted of {count} documents is left out: there was no search"
    elif changed := sorted(quoted.intersection(retrieved.changed)):
        yield f"what earlier turns quoted is left out where it changed: {', '.join(changed)}"


def _put_in(context: PromptContext) -> Iterator[str]:
    tokens = context.notice.tokens
    before = tokens - sum(token_count(insert.tokens) for insert in context.own_inserts)
    earlier = f", {before} of them as in earlier turns" if before else ""
    if tokens:
        yield f"{tokens} tokens inserted into the prompt{earlier}"

"""What a request's story tells of the search for its prompt: when it was asked for, what came of
it, and what of that stands in the prompt. Pure; the steps of the story use it.
"""

from collections.abc import Iterator
from typing import Any

from schemas.codec import to_dict
from schemas.records import Request, Retrieval, Retrieved
from schemas.rules.tokens import token_count
from streams.core.requests.context import Context, with_context

_QUERY_CHARS = 60


def wish(retrieval: Retrieval, arrived_ms: int) -> str:
    """What is to be found, where the request is accepted."""
    by_ms = retrieval.by_ms - arrived_ms
    return f", wants {retrieval.k} passages of {retrieval.collection} by {by_ms} ms"


def outcome(retrieved: Retrieved) -> str:
    """What came of it, in one line."""
    if retrieved.error is not None:
        return f"goes on without passages: {retrieved.error.message} ({retrieved.error.code})"
    count = len(retrieved.passages)
    passages = "1 passage" if count == 1 else f"{count or 'no'} passages"
    how = f" ({retrieved.mode})" if retrieved.mode else ""
    return f"found {passages}{how}, {retrieved.at_ms - retrieved.asked_ms} ms after asking"


def details(request: Request, retrieved: Retrieved, others: int) -> tuple[str, ...]:
    """The search, its passages with those in the prompt marked, and what was put in."""
    if request.retrieval is None:
        return ()
    context = with_context(request, retrieved)
    return (
        *_search(request.retrieval, retrieved),
        *_passages(retrieved, context),
        *_put_in(context),
        *([f"{others} later answers changed nothing"] if others else []),
    )


def wish_value(retrieval: Retrieval) -> dict[str, Any]:
    """For JSON: counts in place of tokens."""
    parts = ("lead", "joint", "trail", "tail")
    return {**to_dict(retrieval), **{part: token_count(getattr(retrieval, part)) for part in parts}}


def retrieved_value(retrieved: Retrieved) -> dict[str, Any]:
    """Likewise."""
    passages = [
        {**to_dict(each), "tokens": token_count(each.tokens)} for each in retrieved.passages
    ]
    history = [[insert.at, token_count(insert.tokens)] for insert in retrieved.history]
    return {**to_dict(retrieved), "passages": passages, "history": history}


def _search(retrieval: Retrieval, retrieved: Retrieved) -> Iterator[str]:
    query = " ".join(retrieval.query.split())
    short = query if len(query) <= _QUERY_CHARS else f"{query[: _QUERY_CHARS - 3]}..."
    yield f"searched {retrieval.collection} for: {short}"
    if retrieved.degraded:
        yield f"by its words alone: {retrieved.degraded}"
    if not retrieved.shards:
        return
    answered = retrieved.shards - len(retrieved.missing)
    yield (
        f"embedded in {retrieved.embedded_ms:.1f} ms; {answered} of {retrieved.shards} shards in "
        f"{retrieved.took_ms:.1f} ms, of that {retrieved.wait_ms:.1f} ms waited for a slot; "
        f"{retrieved.extends} extends, {retrieved.distances_computed:,} distances"
    )
    if retrieved.missing:
        yield f"without shards {', '.join(map(str, retrieved.missing))}, which did not answer"


def _passages(retrieved: Retrieved, context: Context) -> Iterator[str]:
    cited = {citation.passage_id for citation in context.told.citations}
    for passage in retrieved.passages:
        mark = "→" if passage.passage_id in cited else " "
        title = f", {passage.title}" if passage.title else ""
        left_out = "" if passage.passage_id in cited else ", not put in"
        yield (
            f"{mark} {passage.passage_id}{title}: score {passage.score:.3f}, "
            f"{token_count(passage.tokens)} tokens{left_out}"
        )


def _put_in(context: Context) -> Iterator[str]:
    tokens = context.told.tokens
    before = tokens - sum(token_count(insert.tokens) for insert in context.own)
    earlier = f", {before} of them as in earlier turns" if before else ""
    if tokens:
        yield f"{tokens} tokens put into the prompt{earlier}"

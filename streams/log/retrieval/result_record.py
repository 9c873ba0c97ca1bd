"""Builds the `Retrieved` record of a search's result."""

from typing import Any

from schemas.records import Retrieved
from schemas.retrieval import RetrievalResult
from schemas.rules.sizes import fit_passages
from streams.log.clock import wall_ms


def retrieved_record(result: RetrievalResult, **fields: Any) -> Retrieved:
    """Return the record of a result with the passages that fit; `fields` name the request."""
    passages = fit_passages(result.passages)
    return Retrieved(
        passages=passages,
        left_out=len(result.passages) - len(passages),
        shards=result.shards,
        missing=tuple(sorted(result.missing)),
        extends=result.extends,
        distances_computed=result.distances_computed,
        embedded_ms=result.embedded_ms,
        wait_ms=result.wait_ms,
        took_ms=result.took_ms,
        at_ms=wall_ms(),
        mode=result.mode,
        degraded=result.degraded,
        **fields,
    )

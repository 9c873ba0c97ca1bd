"""What a search found, as the record that tells a request of it."""

from typing import Any

from schemas.log.clock import wall_ms
from schemas.records import Retrieved
from schemas.retrieval import Found
from schemas.rules.sizes import passages_within


def retrieved_of(found: Found, **more: Any) -> Retrieved:
    """As of now, with the best passages that a record has room for; `more` are fields of
    Retrieved: for whom, and what its asker knows besides.
    """
    passages = passages_within(found.passages)
    return Retrieved(
        passages=passages,
        left_out=len(found.passages) - len(passages),
        shards=found.shards,
        missing=tuple(sorted(found.missing)),
        extends=found.extends,
        distances_computed=found.distances_computed,
        embedded_ms=found.embedded_ms,
        wait_ms=found.wait_ms,
        took_ms=found.took_ms,
        at_ms=wall_ms(),
        mode=found.mode,
        degraded=found.degraded,
        **more,
    )

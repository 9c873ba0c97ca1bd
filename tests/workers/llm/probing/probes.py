"""Work whose answer searches, and what searches find."""

from collections.abc import Sequence
from typing import Any

from schemas.records import Insert, Passage, Probes, Probing, Retrieval, Retrieved
from schemas.rules.tokens import pack_tokens
from workers.llm.probing.answer import ProbeAsk

LEAD, JOINT, TRAIL = [901], [902], [903]


def probes(
    inserts: Sequence[Insert] = (),
    decided: int = 0,
    known_passages: Sequence[str] = (),
    **wishes: Any,
) -> Probes:
    """A probe after every four tokens, asked for two tokens before; any field of Probing."""
    probing = {
        "every": 4,
        "lookahead": 2,
        "tokens_max": 64,
        "stall_ms": 100,
        "lead": pack_tokens(LEAD),
        "joint": pack_tokens(JOINT),
        "trail": pack_tokens(TRAIL),
    }
    retrieval = Retrieval(
        collection="handbook",
        query="Which pier?",
        k=3,
        by_ms=0,
        tokens_max=64,
        at=1,
        probing=Probing(**{**probing, **wishes}),
    )
    return Probes(
        retrieval=retrieval,
        tenant="blue",
        known_passages=known_passages,
        inserts=inserts,
        decided=decided,
    )


def passage(name: str, *token_ids: int) -> Passage:
    return Passage(
        passage_id=f"{name}#0",
        document_id=name,
        text=f"text of {name}",
        tokens=pack_tokens(token_ids or (700, 701)),
        score=0.5,
        content=f"hash of {name}",
    )


def search_result(ask: ProbeAsk, *passages: Passage, **fields: Any) -> Retrieved:
    """What a search found."""
    return Retrieved(
        request_id=ask.work.request_id,
        session_id=ask.work.session_id,
        router_id=ask.work.worker_id,
        passages=passages,
        asked_ms=ask.asked_ms,
        at_ms=0,
        attempt=ask.work.attempt,
        probe=ask.probe,
        **fields,
    )

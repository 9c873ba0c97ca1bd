"""Builds citations and notices of inserted passages: in prompts (routers) and answers (workers)."""

from schemas.records import Citation, Passage, Retrieved, StreamRetrieved
from schemas.rules.tokens import token_count


def citation(passage: Passage, seq: int = 0, probe: int = 0) -> Citation:
    """Return the citation of a passage; for a probe, with its number and its answer position."""
    return Citation(
        passage_id=passage.passage_id,
        document_id=passage.document_id,
        title=passage.title,
        source=passage.source,
        text=passage.text,
        start=passage.start,
        score=passage.score,
        seq=seq,
        content=passage.content,
        probe=probe,
    )


def probe_notice(record: Retrieved, collection: str) -> StreamRetrieved:
    """Return the notice of a probe that inserted passages."""
    return StreamRetrieved(
        request_id=record.request_id,
        collection=collection,
        citations=tuple(citation(passage, record.seq, record.probe) for passage in record.passages),
        tokens=token_count(record.tokens),
        missing_shards=len(record.missing),
        probe=record.probe,
        seq=record.seq,
        left_out=record.left_out,
    )

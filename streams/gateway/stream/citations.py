"""What an answer says of the passages that stand in its prompt, and of those that probes found.

Citations come from the router and the workers that put the passages there, never from the model's
text. Clients
that know OpenAI's annotations find them there, with the whole answer as their range; `trivium`
holds all that is known.
"""

from collections.abc import Mapping
from typing import Any

from schemas.records import Citation, StreamRetrieved

Json = dict[str, Any]
Retrieved = Mapping[int, StreamRetrieved]  # by probe; 0 is what stands in the prompt


def retrieval(retrieved: Retrieved) -> Json:
    """As `trivium.retrieval` in an answer; there is something in it."""
    notices = in_order(retrieved)
    error = notices[
        0
    ].error  # of the search before the answer; a probe that brought nothing is silent
    return {
        "collection": notices[0].collection,
        "tokens": sum(notice.tokens for notice in notices),
        "missing_shards": max(notice.missing_shards for notice in notices),
        "left_out": sum(notice.left_out for notice in notices),
        "citations": [
            _citation(citation, notice) for notice in notices for citation in notice.citations
        ],
        **({"degraded": notices[0].degraded} if notices[0].degraded else {}),
        **({"error": {"code": error.code, "message": error.message}} if error else {}),
    }


def annotations(retrieved: Retrieved, chars: int) -> list[Json]:
    """In OpenAI's form, of an answer with so many characters; each document once."""
    documents: dict[str, Citation] = {}
    for notice in in_order(retrieved):
        for citation in notice.citations:
            documents.setdefault(citation.document_id, citation)
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": 0,
                "end_index": chars,
                "title": citation.title or document_id,
                "url": citation.source or document_id,
            },
        }
        for document_id, citation in documents.items()
    ]


def in_order(retrieved: Retrieved) -> list[StreamRetrieved]:
    """What was told, the prompt's first."""
    return [notice for _, notice in sorted(retrieved.items())]


def _citation(citation: Citation, notice: StreamRetrieved) -> Json:
    return {
        "document_id": citation.document_id,
        "passage_id": citation.passage_id,
        "title": citation.title,
        "source": citation.source,
        "text": citation.text,
        "start": citation.start,
        "score": round(citation.score, 4),
        "before_token": notice.seq,
        "probe": notice.probe,
    }

"""The part of an answer about the passages in its prompt, and about those that probes found.

Citations come from the router and the workers that inserted the passages, never from the model's
text. Clients that know OpenAI's annotations find them there, with the whole answer as their range;
`trivium` has all fields.
"""

from collections.abc import Mapping
from typing import Any

from schemas.records import Citation, StreamRetrieved

Json = dict[str, Any]
Retrieved = Mapping[int, StreamRetrieved]  # by probe; 0 is the prompt's search


def retrieval(retrieved: Retrieved) -> Json:
    """Return `trivium.retrieval` of an answer; `retrieved` must not be empty."""
    notices = in_order(retrieved)
    error = notices[0].error  # of the search before the answer; errors of probes are not reported
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
    """Return OpenAI's annotations of an answer with `chars` characters; each document once."""
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
    """Return the notices in the order of their probes, the prompt's first."""
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

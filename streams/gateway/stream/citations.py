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
    told = in_order(retrieved)
    error = told[0].error  # of the search before the answer; a probe that brought nothing is silent
    return {
        "collection": told[0].collection,
        "tokens": sum(each.tokens for each in told),
        "missing_shards": max(each.missing_shards for each in told),
        "left_out": sum(each.left_out for each in told),
        "citations": [_citation(one, each) for each in told for one in each.citations],
        **({"degraded": told[0].degraded} if told[0].degraded else {}),
        **({"error": {"code": error.code, "message": error.message}} if error else {}),
    }


def annotations(retrieved: Retrieved, chars: int) -> list[Json]:
    """In OpenAI's form, of an answer with so many characters; each document once."""
    documents: dict[str, Citation] = {}
    for told in in_order(retrieved):
        for each in told.citations:
            documents.setdefault(each.document_id, each)
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": 0,
                "end_index": chars,
                "title": each.title or document_id,
                "url": each.source or document_id,
            },
        }
        for document_id, each in documents.items()
    ]


def in_order(retrieved: Retrieved) -> list[StreamRetrieved]:
    """What was told, the prompt's first."""
    return [told for _, told in sorted(retrieved.items())]


def _citation(each: Citation, told: StreamRetrieved) -> Json:
    return {
        "document_id": each.document_id,
        "passage_id": each.passage_id,
        "title": each.title,
        "source": each.source,
        "text": each.text,
        "start": each.start,
        "score": round(each.score, 4),
        "before_token": told.seq,
        "probe": told.probe,
    }

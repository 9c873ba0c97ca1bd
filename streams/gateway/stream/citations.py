"""What an answer says of the passages that stand in its prompt.

Citations come from the router that put the passages there, never from the model's text. Clients
that know OpenAI's annotations find them there, with the whole answer as their range; `trivium`
holds all that is known.
"""

from typing import Any

from schemas.records import Citation, StreamRetrieved

Json = dict[str, Any]


def retrieval(retrieved: StreamRetrieved) -> Json:
    """As `trivium.retrieval` in an answer."""
    error = retrieved.error
    return {
        "collection": retrieved.collection,
        "tokens": retrieved.tokens,
        "missing_shards": retrieved.missing_shards,
        "citations": [_citation(each) for each in retrieved.citations],
        **({"error": {"code": error.code, "message": error.message}} if error else {}),
    }


def annotations(retrieved: StreamRetrieved | None, chars: int) -> list[Json]:
    """In OpenAI's form, of an answer with so many characters; each document once."""
    documents: dict[str, Citation] = {}
    for each in retrieved.citations if retrieved else ():
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


def _citation(each: Citation) -> Json:
    return {
        "document_id": each.document_id,
        "passage_id": each.passage_id,
        "title": each.title,
        "source": each.source,
        "text": each.text,
        "start": each.start,
        "score": round(each.score, 4),
        "before_token": each.seq,
    }

"""Documents that were quoted, and what became of them."""

from schemas.records import Quoted
from schemas.retrieval import shard_of
from tests.workers.retrieval.passages.passage_fixtures import (
    collections,
    deletion,
    document,
    passages,
    text,
    vector_of,
)
from workers.retrieval.collections import Collections
from workers.retrieval.responder import changed_quotes


def ask(
    shard_collections: Collections, *quoted: str, tenant: str = "", shard: int = 0, shards: int = 1
) -> str:
    """Names of what changed of documents quoted as `name=content`."""
    pairs = (quote.split("=") for quote in quoted)
    quotes = [Quoted(document_id=name, content=content) for name, content in pairs]
    return " ".join(
        changed_quotes(quotes, shard_collections.indexes.get("c"), tenant, shard, shards)
    )


def put(
    shard_collections: Collections, name: str, content: str, offset: int, tenant: str = ""
) -> None:
    assert shard_collections.apply([text(name, offset, tenant=tenant)]) == []
    change = passages(name, "one", "two", offset=offset, content_hash=content, tenant=tenant)
    assert shard_collections.apply_passages([change]) == []


def test_quote_check_reports_edited_deleted_and_unknown_documents() -> None:
    """A stale passage is reported to whoever quotes it."""
    shard_collections = collections()
    assert ask(shard_collections, "a=1") == "a", "nothing is held at all"
    for name in "abcd":
        put(shard_collections, name, "1", 1)
    assert ask(shard_collections, "a=1", "b=1", "a=2", "x=1") == "a x"
    put(shard_collections, "a", "2", 2)
    assert shard_collections.apply([deletion("b", 3)]) == []
    assert shard_collections.apply([document("c", 4, vector=vector_of("c"))]) == []
    assert ask(shard_collections, "a=1", "b=1", "c=1", "d=1") == "a b c"
    put(shard_collections, "a", "2", 5)
    assert ask(shard_collections, "a=2", "d=1") == "", "the same text again is no other"
    assert ask(shard_collections, "a=", "c=") == "a c", "of which nobody knows what they said"


def test_quote_check_reports_documents_hidden_from_tenant() -> None:
    shard_collections = collections()
    put(shard_collections, "mine", "1", 1, tenant="t")
    put(shard_collections, "open", "1", 2)
    put(shard_collections, "other", "1", 3, tenant="u")
    assert ask(shard_collections, "mine=1", "open=1", "other=1", tenant="t") == "other"
    assert ask(shard_collections, "mine=1", "open=1", "other=1") == ""
    put(shard_collections, "mine", "1", 4, tenant="u")
    assert ask(shard_collections, "mine=1", tenant="t") == "mine"


def test_quote_check_covers_documents_of_own_shard() -> None:
    shard_collections = collections()
    names = [f"d{number}" for number in range(8)]
    answers = [
        ask(shard_collections, *(f"{name}=1" for name in names), shard=at, shards=2)
        for at in range(2)
    ]
    assert answers == [
        " ".join(name for name in names if shard_of(name, 2) == at) for at in range(2)
    ]

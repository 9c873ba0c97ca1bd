"""Documents that were quoted, and what became of them."""

from schemas.records import Quoted
from schemas.retrieval import shard_of
from tests.workers.search.words.shelves import (
    collections,
    document,
    gone,
    passages,
    text,
    vector_of,
)
from workers.search.service.collections import Collections
from workers.search.words.quotes import changed_quotes


def ask(held: Collections, *quoted: str, tenant: str = "", shard: int = 0, shards: int = 1) -> str:
    """Names of what changed of documents quoted as `name=content`."""
    pairs = (each.split("=") for each in quoted)
    asked = [Quoted(document_id=name, content=content) for name, content in pairs]
    return " ".join(changed_quotes(asked, held.indexes.get("c"), tenant, shard, shards))


def put(held: Collections, name: str, content: str, offset: int, tenant: str = "") -> None:
    assert held.apply([text(name, offset, tenant=tenant)]) == []
    made = passages(name, "one", "two", offset=offset, content_hash=content, tenant=tenant)
    assert held.apply_passages([made]) == []


def test_what_was_edited_deleted_or_never_there_has_changed() -> None:
    """A stale passage is told to whoever quotes it."""
    held = collections()
    assert ask(held, "a=1") == "a", "nothing is held at all"
    for name in "abcd":
        put(held, name, "1", 1)
    assert ask(held, "a=1", "b=1", "a=2", "x=1") == "a x"
    put(held, "a", "2", 2)
    assert held.apply([gone("b", 3)]) == []
    assert held.apply([document("c", 4, vector=vector_of("c"))]) == []
    assert ask(held, "a=1", "b=1", "c=1", "d=1") == "a b c"
    put(held, "a", "2", 5)
    assert ask(held, "a=2", "d=1") == "", "the same text again is no other"
    assert ask(held, "a=", "c=") == "a c", "of which nobody knows what they said"


def test_a_tenant_is_told_of_documents_that_are_not_for_it() -> None:
    held = collections()
    put(held, "mine", "1", 1, tenant="t")
    put(held, "open", "1", 2)
    put(held, "other", "1", 3, tenant="u")
    assert ask(held, "mine=1", "open=1", "other=1", tenant="t") == "other"
    assert ask(held, "mine=1", "open=1", "other=1") == ""
    put(held, "mine", "1", 4, tenant="u")
    assert ask(held, "mine=1", tenant="t") == "mine"


def test_each_shard_tells_of_its_own_documents() -> None:
    held = collections()
    names = [f"d{number}" for number in range(8)]
    told = [ask(held, *(f"{each}=1" for each in names), shard=at, shards=2) for at in range(2)]
    assert told == [" ".join(each for each in names if shard_of(each, 2) == at) for at in range(2)]

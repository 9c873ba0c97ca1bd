"""`trivium collections` and `trivium search --text`, over a real broker, pools and embedder."""

import asyncio
import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from infra.cli.retrieve import collections, search
from schemas.errors import ConfigError, UnknownCollection
from schemas.fleet import FleetView
from schemas.records import (
    CollectionState,
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
    SearchCapability,
    SearchLoad,
)
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from streams.log.retrieval.results import embedding_workers
from tests.waits import until
from tests.workers.embed.bookshelf import bookshelf
from tests.workers.embed.bookshelf import worker as embedder
from tests.workers.retrieval.retrieval_workers import calm, library, ready, worker


async def command_output(
    capsys: pytest.CaptureFixture[str], command: Any, *args: Any, **fields: Any
) -> Any:
    """The command's output; the command runs in a thread, since it has its own event loop."""
    capsys.readouterr()
    await asyncio.to_thread(command, *args, **fields)
    text = capsys.readouterr().out
    return json.loads(text) if fields.get("as_json") else text


async def test_collections_and_search_commands_find_ingested_document(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = SimpleNamespace(log=kafka)
    for name in ("collections", "search"):
        module = importlib.import_module(f"infra.cli.retrieve.{name}")
        monkeypatch.setattr(module, "settings_of_running", lambda *_: running)
    async with (
        calm(),
        bookshelf(kafka) as shelf,
        library(kafka) as books,
        embedder(kafka, "e"),
        worker(kafka, "r"),
    ):
        await ready(books, 1)
        view = books.asker.membership.view
        await until(lambda: bool(embedding_workers(view, wall_ms())))
        assert "may be searched by shop, depot" in await command_output(
            capsys, collections.declare, "books", tenant=["shop", "depot", "shop"]
        )
        metadata = json.dumps({"title": "Ferries\x1b[31m", "source": "docs/ferries.md"})
        await shelf.put("ferry", "The Ondry ferry leaves\nfrom pier 7.", metadata=metadata)

        async def all_there() -> bool:
            listing = await command_output(capsys, collections.show, as_json=True)
            rows = [row for row in listing["collections"] if row["passages"] == 1]
            return bool(rows) and listing["documents_waiting"] == listing["records_behind"] == 0

        await until(all_there)
        (row,) = (await command_output(capsys, collections.show, as_json=True))["collections"]
        assert (row["documents"], row["embedder"][:5], row["tenants"]) == (
            1, "hash@", ["shop", "depot"]
        )  # fmt: skip
        table = await command_output(capsys, collections.show)
        assert "books" in table and "shop, depot" in table and "not embedded yet: 0" in table
        query = {"text": "ferry pier", "collection": "books"}
        output = await command_output(capsys, search.search, **query, tenant="shop")
        assert "1  ferry#0" in output and "from pier 7." in output and "docs/ferries.md" in output
        assert "1 of 1 shards, exact, by vector and words" in output and "\x1b[31m" not in output
        plain = await command_output(capsys, search.search, **query, mode="words", as_json=True)
        (hit,) = plain["hits"]
        assert plain["mode"] == "words" and "distance" not in hit and hit["words"] > 0
        assert hit["passage"]["document_id"] == "ferry"
        with pytest.raises(UnknownCollection):
            await command_output(capsys, search.search, **query, tenant="other")
        await command_output(capsys, collections.declare, "books", withdraw=True, as_json=True)
        assert not (await command_output(capsys, collections.show, as_json=True))["collections"][0][
            "declared"
        ]


def test_search_and_declare_reject_bad_arguments() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"text": "x", "vector": "1"}, "one of --text"),
        ({"text": " "}, "not an empty one"),
        ({"text": "x", "mode": "all"}, "--mode"),
        ({}, "expected one of"),
    ]
    for options, error in wrong:
        with pytest.raises(ConfigError, match=error):
            search.search(**options)
    names: list[tuple[str, list[str]]] = [("a/b", []), ("", []), ("a", [""])]
    for name, tenants in names:
        with pytest.raises(ConfigError, match="expected a name"):
            collections.declare(name, tenant=tenants)


def test_collection_counts_sum_shards_and_skip_replicas() -> None:
    view = FleetView()
    for offset, (name, shard, count) in enumerate([("a", 0, 5), ("b", 0, 4), ("c", 1, 3)]):
        part = SearchCapability(shard=shard, shards=2, backend="cpu", slots=8)
        joined = Registration(
            member_id=name, epoch=1, kind=MemberKind.WORKER, roles=(Role.RETRIEVAL,),
            started_ms=0, search=part,
        )  # fmt: skip
        view.apply(joined, offset, 0)
        state = CollectionState(name="c", dim=4, metric="cosine", documents=count, passages=9)
        beat = Heartbeat(
            member_id=name, epoch=1, seq=1, at_ms=0, state=MemberState.READY, load=Load(),
            search=SearchLoad(collections=(state,)),
        )  # fmt: skip
        view.apply(beat, offset, 0)
    (row,) = (collection_row.as_plain() for collection_row in collections.rows_of(view, 0).values())
    assert (row["documents"], row["passages"], row["shards_with_documents"]) == (8, 18, 2)

"""Implements `trivium collections`: shows and declares what can be searched, and by whom."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.fleet import FleetView
    from schemas.records import CollectionDeclared, CollectionState
    from schemas.settings import LogSettings

app = typer.Typer(help="Show collections; declare who may search.")
Name = Annotated[str, typer.Argument(help="The collection.")]


@dataclass(slots=True)
class CollectionRow:
    """A collection over all shards; of a shard's replicas, the one with the most documents."""

    name: str
    by_shard: dict[int, "CollectionState"] = field(default_factory=dict)
    shards: int = 0
    declared: "CollectionDeclared | None" = None

    def as_plain(self) -> dict[str, Any]:
        states = list(self.by_shard.values())
        declaration = self.declared
        bound = next((state.embedder for state in states if state.embedder), "")
        return {
            "collection": self.name,
            "documents": sum(state.documents for state in states),
            "passages": sum(state.passages for state in states),
            "dim": max((state.dim for state in states), default=0),
            "metric": states[0].metric if states else "",
            "embedder": (declaration.embedder if declaration else "") or bound,
            "tenants": list(declaration.tenants) if declaration else [],
            "declared": declaration is not None,
            "shards": self.shards,
            "shards_with_documents": len(self.by_shard),
        }


@app.callback(invoke_without_command=True)
def main(
    ctx: typer.Context,
    config: Config = None,
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
) -> None:
    """Show collections; declare who may search."""
    if ctx.invoked_subcommand is None:
        show(config, bootstrap, as_json)


@app.command("list", epilog="Example: trivium collections list --json | jq .documents_waiting")
def show(config: Config = None, bootstrap: Bootstrap = None, as_json: AsJson = False) -> None:
    """Show documents, passages, embedder and tenants of each, and the records not yet indexed."""
    listing = asyncio.run(_read_listing(settings_of_running(config, bootstrap).log))
    if as_json:
        print_json(listing)
    else:
        _show(listing)


@app.command(epilog="Example: trivium collections declare books --tenant shop --tenant depot")
def declare(
    name: Name,
    tenant: Annotated[
        list[str] | None, typer.Option(help="Who may search it; may be repeated; none: all.")
    ] = None,
    embedder: Annotated[
        str, typer.Option(help="Its only embedder, NAME@VERSION; empty: that of its first text.")
    ] = "",
    chunk_tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of a passage; 0: as configured.")
    ] = 0,
    chunk_overlap: Annotated[
        int,
        typer.Option(min=-1, help="Tokens shared with the previous passage; -1: as configured."),
    ] = -1,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Remove the declaration; documents stay.")
    ] = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
) -> None:
    """Declare who may search a collection and how it is embedded, in place of earlier declarations.

    Workers enforce it for every search, whatever its filter. With another embedder, the passages of
    the former one are dropped, and documents have to be ingested again.
    """
    from schemas.rules.sizes import COLLECTION_CHARS_MAX, is_collection

    if not is_collection(name):
        raise ConfigError(
            f"expected a name of 1 to {COLLECTION_CHARS_MAX} characters without a slash, found "
            f"{name!r}"
        )
    tenants = tuple(dict.fromkeys(tenant or ()))
    if not all(tenants):
        raise ConfigError("--tenant: expected a name, found an empty one")
    fields = {
        "collection": name, "tenants": tenants, "embedder": embedder,
        "chunk_tokens": chunk_tokens, "chunk_overlap": chunk_overlap,
    }  # fmt: skip
    asyncio.run(_declare(settings_of_running(config, bootstrap).log, name, fields, withdraw))
    if as_json:
        print_json({**fields, "tenants": list(tenants), "declared": not withdraw})
    elif withdraw:
        print(f"collection {printable(name)}: its declaration is withdrawn")
    else:
        who = ", ".join(map(printable, tenants)) or "everybody"
        print(f"collection {printable(name)}: may be searched by {who}")


async def _declare(log: "LogSettings", name: str, fields: dict[str, Any], withdraw: bool) -> None:
    from schemas.records import CollectionDeclared
    from streams.log.clients import LogProducer
    from streams.log.clock import wall_ms
    from streams.log.documents import declare as declare_collection
    from streams.log.registry import make_codec

    codec = await asyncio.to_thread(make_codec, log)
    producer = LogProducer(log, codec, durable=True, client_id="trivium-collections")
    await producer.start()
    try:
        declaration = None if withdraw else CollectionDeclared(**fields, at_ms=wall_ms())
        await declare_collection(producer, log, name, declaration)
    finally:
        await producer.stop()


async def _read_listing(log: "LogSettings") -> dict[str, Any]:
    from infra.stack.fleet_watch import FleetWatch
    from schemas.records import MemberKind
    from streams.log.clock import wall_ms
    from streams.log.registry import make_codec

    codec = await asyncio.to_thread(make_codec, log)
    fleet = FleetWatch(log, codec)
    await fleet.start()
    await fleet.stop()
    rows = rows_of(fleet.view, wall_ms())
    for declaration in await _read_declarations(log, codec):
        rows.setdefault(
            declaration.collection, CollectionRow(declaration.collection)
        ).declared = declaration
    living = list(fleet.view.living(MemberKind.WORKER, wall_ms()))
    embeds = any(member.registration.embedding is not None for member in living)
    return {
        "collections": [row.as_plain() for _, row in sorted(rows.items())],
        "documents_waiting": await _count_waiting(log, fleet.view) if embeds else None,
        "retrieval_workers": sum(member.search is not None for member in living),
        "records_behind": max([0, *[member.search.behind for member in living if member.search]]),
    }


def rows_of(view: "FleetView", now_ms: int) -> dict[str, CollectionRow]:
    """Return what the living retrieval workers of the present layout have, by collection."""
    from schemas.records import MemberKind
    from streams.log.retrieval.results import layout_of

    layout, rows = layout_of(view, now_ms), dict[str, CollectionRow]()
    for member in view.living(MemberKind.WORKER, now_ms):
        part, load = member.registration.search, member.search
        if part is None or load is None or part.shards != layout.shards:
            continue
        for state in load.collections:
            row = rows.setdefault(state.name, CollectionRow(state.name, shards=layout.shards))
            largest = row.by_shard.get(part.shard)
            if largest is None or largest.documents < state.documents:
                row.by_shard[part.shard] = state
    return rows


async def _read_declarations(log: "LogSettings", codec: Any) -> "Iterable[CollectionDeclared]":
    """Return the last declaration of each collection; reads a partition of `documents`."""
    from schemas.errors import RecordError
    from schemas.records import CollectionDeclared
    from schemas.topics import declaration_key
    from streams.log.clients import AssignedReader

    reader = AssignedReader(log, "documents", [0], client_id="trivium-collections")
    await reader.start("earliest")
    declarations: dict[bytes, CollectionDeclared] = {}
    try:
        for record in await reader.read_to_end():
            if not (record.key or b"").startswith(declaration_key("").encode()):
                continue
            declarations.pop(record.key, None)
            try:
                declaration = codec.decode(record.value) if record.value else None
            except RecordError:
                continue
            if isinstance(declaration, CollectionDeclared):
                declarations[record.key] = declaration
    finally:
        await reader.stop()
    return declarations.values()


async def _count_waiting(log: "LogSettings", view: "FleetView") -> int:
    """Count the records of `documents` that an embedding pool has not acknowledged."""
    from aiokafka import TopicPartition

    from streams.log.clock import wall_ms
    from streams.log.connecting import query_client
    from streams.log.documents import embedding_groups

    topic = log.topic_prefix + "documents"
    places = [TopicPartition(topic, partition) for partition in range(log.document_partitions)]
    waiting = dict.fromkeys(places, 0)
    for group in embedding_groups(log, view, wall_ms()):
        async with query_client(log, group) as consumer:
            consumer.assign(places)
            ends = await consumer.end_offsets(places)
            first = await consumer.beginning_offsets(places)
            for place in places:
                position = await consumer.committed(place) or first[place]
                waiting[place] = max(waiting[place], ends[place] - position)
    return sum(waiting.values())


def _show(listing: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    names = ("collection", "documents", "passages", "dim", "embedder", "tenants", "shards")
    table = Table(*names, box=None, padding=(0, 2, 0, 0))
    for row in listing["collections"]:
        who = ", ".join(row["tenants"]) or "everybody"
        shards = f"{row['shards_with_documents']} of {row['shards']}"
        cells = (row["collection"], str(row["documents"]), str(row["passages"]),
                 str(row["dim"] or "-"), row["embedder"] or "-", who, shards)  # fmt: skip
        table.add_row(*[Text(printable(cell)) for cell in cells])
    console = stdout_console()
    console.print(
        table if listing["collections"] else "no collection has documents or a declaration"
    )
    waiting = listing["documents_waiting"]
    text = "no embedding worker is alive" if waiting is None else f"not embedded yet: {waiting}"
    console.print(f"documents {text}" if waiting is not None else text)
    if listing["retrieval_workers"]:
        console.print(f"records that are not in the indexes yet: {listing['records_behind']}")
    else:
        console.print("no retrieval worker is alive, so the documents of collections are unknown")

"""Implements `trivium status`: the fleet as its own heartbeats report it, live."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.stack.statefile import read_state
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable
from schemas.errors import BrokerUnavailable

if TYPE_CHECKING:
    from infra.stack.configuration import Settings
    from infra.stack.fleet_watch import FleetWatch
    from schemas.records import Capability, Registration
    from schemas.settings import LogSettings

_REFRESH_S = 0.5
_MISSED_TOLD = 0.01  # share of documents that searches for themselves miss


def status(
    once: Annotated[
        bool, typer.Option("--once", help="Print once, as if the output is no terminal.")
    ] = False,
    bridges: Annotated[
        bool, typer.Option("--bridges", help="Show how far prompts on topics are answered.")
    ] = False,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Show all members, their load and their KV.

    Show workers, routers, gateways and bridges: states, credits, queues, tokens per second, KV.

    With --bridges, it shows for each partition of prompts how many records have no answer yet, for
    how long, and which bridge owns it. It asks Kafka alone, so it also works while bridges are
    down.

    Examples: `trivium status`, `trivium status --json | jq '.[].state'`,
    `trivium status --bridges --json | jq '[.[].lag] | add'`
    """
    if bridges:
        _show_bridges(settings_of_running(config, bootstrap), as_json)
        return
    once = once or as_json or not sys.stdout.isatty()
    asyncio.run(_show(settings_of_running(config, bootstrap).log, once, as_json))


def _show_bridges(settings: "Settings", as_json: bool) -> None:
    from rich.table import Table

    from infra.stack.bridge_lag import bridge_lags

    rows = asyncio.run(bridge_lags(settings.log, settings.bridge))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    columns = ("pair", "partition", "position", "end", "lag", "oldest", "answers/s", "bridge")
    table = Table(*columns, box=None)
    for row in rows:
        oldest = f"{row.oldest_ms / 1_000:.1f} s" if row.lag else "-"
        numbers = map(str, (row.partition, row.position, row.end, row.lag))
        table.add_row(row.pair, *numbers, oldest, f"{row.answers_per_s:g}", row.owner or "none")
    stdout_console().print(table)


async def _show(log: "LogSettings", once: bool, as_json: bool) -> None:
    from rich.live import Live

    from infra.stack.fleet_watch import FleetWatch
    from streams.log.registry import make_codec

    fleet = FleetWatch(log, await asyncio.to_thread(make_codec, log))
    try:
        await fleet.start()
    except BrokerUnavailable as error:
        _show_launched(error, as_json)
        return
    try:
        if as_json:
            print_json(members(fleet))
        elif once:
            stdout_console().print(_view(members(fleet)))
        else:
            following = asyncio.create_task(fleet.follow())
            with Live(_view(members(fleet)), auto_refresh=False) as live:
                while not following.done():
                    live.update(_view(members(fleet)), refresh=True)
                    await asyncio.wait([following], timeout=_REFRESH_S)
            following.result()
    finally:
        await fleet.stop()


def _show_launched(error: BrokerUnavailable, as_json: bool) -> None:
    """Show the processes of the stack that runs here from its state file, without the log.

    Raises the error where no stack runs.
    """
    from rich.table import Table

    stack = read_state()
    if stack is None:
        raise error
    if as_json:
        print_json([{"member_id": row.name, **asdict(row)} for row in stack.processes])
        return
    table = Table("process", "state", "pid", "restarts", "log", box=None, padding=(0, 1, 0, 0))
    for row in stack.processes:
        table.add_row(row.name, row.state, str(row.pid or ""), str(row.restarts), row.log_file)
    console = stdout_console()
    console.print(f"no broker answers at {stack.bootstrap}; processes wait for it, as they are:")
    console.print(table)


def members(fleet: "FleetWatch") -> list[dict[str, Any]]:
    """Return one dictionary per member that is not gone, in order of kind and id."""
    from schemas.records import MemberState
    from streams.log.clock import wall_ms

    now_ms, rows = wall_ms(), []
    for member in fleet.view.members.values():
        if member.state is MemberState.GONE:
            continue
        registration = member.registration
        credits: dict[str, int] = {}
        for (_router, role), count in member.credits.items():
            credits[role.value] = credits.get(role.value, 0) + count
        rows.append(
            {
                "member_id": member.member_id,
                "kind": _kind(registration),
                "roles": [role.value for role in registration.roles],
                "state": member.condition if member.is_alive(now_ms) else "lost",
                "epoch": member.epoch,
                "host": registration.host,
                "pid": registration.pid,
                "url": registration.url,
                "leases": {lease.topic: lease.partition for lease in registration.leases},
                "engine": registration.capability.engine if registration.capability else "",
                "model": registration.capability.model if registration.capability else "",
                **_abilities(registration.capability),
                "credits": credits,
                "load": asdict(member.load),
                "shard": asdict(registration.search) if registration.search else None,
                "search": asdict(member.search) if member.search else None,
                "embedder": asdict(registration.embedding) if registration.embedding else None,
                "embedding": asdict(member.embedding) if member.embedding else None,
                "faults": asdict(member.faults) if member.faults else None,
                "clock_ms": member.ahead_ms,
                "silent_ms": max(0, now_ms - member.seen_ms),
            }
        )
    return sorted(rows, key=lambda row: (row["kind"] == "worker", row["member_id"]))


def _kind(registration: "Registration") -> str:
    """Return the kind; a bridge is registered as a gateway without an address."""
    from schemas.records import MemberKind

    is_bridge = registration.kind is MemberKind.GATEWAY and not registration.url
    return "bridge" if is_bridge else registration.kind.value


def _abilities(capability: "Capability | None") -> dict[str, Any]:
    """Return the capabilities of a worker for remote placements."""
    return {
        "tensor_parallel": capability.tensor_parallel if capability else 0,
        "block_size": capability.block_size if capability else 0,
        "orchestrations": [way.value for way in capability.orchestrations] if capability else [],
    }


def _view(rows: list[dict[str, Any]]) -> Any:
    """Return tables of members, engines (equal ones in one row) and retrieval workers."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts = [_table(rows)]
    workers_by_key: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["engine"]:
            ways = ", ".join(row["orchestrations"]) or "none"
            parallel = str(row["tensor_parallel"])
            key: tuple[str, ...] = (row["engine"], row["model"], parallel, ways)
            workers_by_key.setdefault(key, []).append(row["member_id"])
    heads = ("engine", "model", "tensor parallel", "orchestrations", "workers")
    engines = Table(*heads, box=None, padding=(0, 1, 0, 0))
    for abilities, worker_ids in workers_by_key.items():
        engines.add_row(*abilities, ", ".join(worker_ids))
    if workers_by_key:
        parts += ["", engines]
    if len(rows) > 1:
        parts += ["", _clocks(rows)]
    parts += [Text(line) for line in _faults(rows)]
    if any(row["search"] for row in rows):
        parts += ["", _searchers(rows)]
    if any(row["embedder"] for row in rows):
        parts += ["", _embedders(rows)]
    return Group(*parts)


def _clocks(rows: list[dict[str, Any]]) -> str:
    """Return how well the members' clocks agree, measured by their heartbeats."""
    from schemas.fleet import CLOCK_MARGIN_MS

    first, *_, last = sorted(rows, key=lambda row: row["clock_ms"])
    apart_ms = last["clock_ms"] - first["clock_ms"]
    if apart_ms <= CLOCK_MARGIN_MS:
        return f"Clocks agree within {apart_ms} ms; KV moves within {CLOCK_MARGIN_MS} ms."
    return (
        f"Clocks differ by {apart_ms} ms ({first['member_id']} is behind {last['member_id']}): "
        f"above {CLOCK_MARGIN_MS} ms no KV moves between two workers; keep them by NTP."
    )


def _faults(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what members cannot do, and what they could not read."""
    for row in rows:
        if not (faults := row["faults"]):
            continue
        if faults["failing"]:
            yield printable(f"{row['member_id']} fails: {faults['failing']}")
        if count := faults["unreadable_total"]:
            notice = f"passed over {count} that it could not read; the last: {faults['unreadable']}"
            yield printable(f"{row['member_id']} {notice}; see `trivium dlq list`")


def _searchers(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    heads = ("retrieval", "shard", "documents", "running", "waiting", "wait p95 ms", "share")
    table = Table(*heads, "searches", "missed", box=None, padding=(0, 1, 0, 0))
    for row in rows:
        search, shard = row["search"], row["shard"]
        if not search or not shard:
            continue
        collections = map(_collection, search["collections"])
        waits = (search["prefill_wait_ms_p95"], search["decode_wait_ms_p95"])
        table.add_row(
            row["member_id"],
            f"{shard['shard']}/{shard['shards']}",
            ", ".join(collections) or "none",
            f"{search['running']}/{shard['slots']}",
            f"{search['waiting_prefill']}/{search['waiting_decode']}",
            "/".join(f"{wait:.1f}" for wait in waits),
            f"{search['share']:.2f}",
            str(search["searches_total"]),
            str(search["misses_total"]),
        )
    return table


def _embedders(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    heads = ("embedding", "embedder", "waiting", "queries", "documents", "unchanged", "passages")
    table = Table(*heads, "ms/text", box=None, padding=(0, 1, 0, 0))
    for row in rows:
        embedder, load = row["embedder"], row["embedding"]
        if not embedder or not load:
            continue
        counts = ("waiting", "queries_total", "documents_total", "unchanged_total", "chunks_total")
        table.add_row(
            row["member_id"],
            f"{embedder['embedder']}, {embedder['dim']} values",
            *(str(load[count]) for count in counts),
            f"{load['ms_per_text']:.1f}",
        )
    return table


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text("no member is alive; start some with `trivium up`")
    heads = ("member", "roles", "state", "credits", "running", "waiting", "tokens/s")
    table = Table(*heads, "KV blocks", "KV out/in", box=None, padding=(0, 1, 0, 0))
    table.columns[0].min_width = max(len(row["member_id"]) for row in rows)  # ids are never cut
    table.columns[1].min_width = len("retrieval")
    for column in table.columns[1:]:
        column.overflow = "fold"  # for a narrow terminal
    for row in rows:
        load = row["load"]
        blocks = f"{load['kv_blocks_used']}/{load['kv_blocks_total']}"
        moved = f"{_megabytes(load['kv_bytes_sent'])}/{_megabytes(load['kv_bytes_received'])}"
        table.add_row(
            Text(row["member_id"], no_wrap=True),
            ", ".join(row["roles"]) or row["kind"],
            _state(row),
            "/".join(str(count) for count in row["credits"].values()),
            str(load["running"]),
            str(load["waiting"] or ""),
            f"{load['tokens_per_s']:.0f}",
            blocks if load["kv_blocks_total"] else "",
            moved if moved != "0/0" else "",
        )
    return table


def _state(row: dict[str, Any]) -> Any:
    """Return a member's state, and how long it has been silent if it is lost."""
    from rich.text import Text

    from infra.terminal.stack_display import COLOURS

    silence = f" {row['silent_ms'] / 1000:.0f} s" if row["state"] == "lost" else ""
    return Text(row["state"] + silence, style=COLOURS.get(row["state"], "red"))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count else "0"


def _collection(collection: dict[str, Any]) -> str:
    """Return a collection's documents at a worker, and the missed share if it is notable."""
    share = collection["missed_share"]
    missed = f" ({share:.1%} not found)" if share >= _MISSED_TOLD else ""
    return f"{collection['name']} {collection['documents']}{missed}"

"""`trivium search`: one query through the retrieval pool."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.cli.retrieve.arrays import read_vector
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable
from schemas.errors import ConfigError
from schemas.settings import LogSettings

if TYPE_CHECKING:
    from schemas.retrieval import Found


def search(
    vector: Annotated[
        str | None, typer.Option(help="Numbers with commas: `--vector=0.1,-0.2`.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A .npy file with one vector instead.", dir_okay=False)
    ] = None,
    collection: Annotated[str, typer.Option("--collection", "-c", help="Where.")] = "default",
    k: Annotated[int, typer.Option("-k", help="Documents wanted.")] = 10,
    where: Annotated[
        str, typer.Option("--filter", help="JSON over metadata, see the examples.")
    ] = "",
    kind: Annotated[
        str, typer.Option("--class", help="prefill or decode: who is served first, and by when.")
    ] = "decode",
    top_m: Annotated[
        int, typer.Option(min=0, help="Length of the routing list: recall for time; 0: as usual.")
    ] = 0,
    patience: Annotated[
        int, typer.Option(min=0, help="Stop after so many extends without a change; 0: as usual.")
    ] = 0,
    seed: Annotated[
        list[str] | None, typer.Option(help="Document to begin at, any number of times.")
    ] = None,
    wants_seeds: Annotated[bool, typer.Option("--seeds", help="Show seeds for the next.")] = False,
    deadline_ms: Annotated[int, typer.Option(min=1, help="Wait so long at most.")] = 5_000,
    config: Config = None,
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
) -> None:
    """Find the documents nearest to a vector, in all shards.

    Examples: `trivium search --vector=0.1,0.2 -c books -k 3`,
    `trivium search --file q.npy -c books --filter '{"year": {"$gte": 2020}}' --json`
    """
    values = vector_from(vector, file)
    log = settings_of_running(config, bootstrap).log
    if kind not in ("prefill", "decode"):
        raise ConfigError(f"--class: expected prefill or decode, found {kind!r}")
    fields = {
        "collection": collection, "k": k, "filter": where, "kind": kind, "top_m": top_m,
        "patience": patience, "seeds": seed or (), "wants_seeds": wants_seeds,
    }  # fmt: skip
    found = asyncio.run(_search(log, values, deadline_ms, fields))
    if as_json:
        print_json(as_plain(found))
    else:
        _show(found)


def vector_from(text: str | None, file: Path | None) -> Any:
    """The vector of the options; raises ConfigError unless there is just one."""
    import numpy as np

    if (text is None) == (file is None):
        raise ConfigError("expected one of --vector 0.1,0.2,... and --file vector.npy")
    if text is not None:
        try:
            return np.array([float(each) for each in text.split(",")], np.float32)
        except ValueError as error:
            raise ConfigError(f"--vector: expected numbers with commas: {error}") from error
    assert file is not None
    return read_vector(file)


async def _search(
    log: LogSettings, values: Any, deadline_ms: int, fields: dict[str, Any]
) -> "Found":
    from schemas.log.clock import wall_ms
    from schemas.log.registry import make_codec
    from schemas.log.retrieval.member import asking

    codec = await asyncio.to_thread(make_codec, log)
    async with asking(log, codec, f"search-{os.getpid()}") as asker:
        return await asker.search(values, deadline_ms=wall_ms() + deadline_ms, **fields)


def as_plain(found: "Found") -> dict[str, Any]:
    """An answer as JSON shows it."""
    return {
        "retrieval_id": found.retrieval_id,
        "hits": [{"id": hit.document_id, "distance": hit.distance} for hit in found.hits],
        "shards": found.shards,
        "missing": {str(shard): error.message for shard, error in found.missing.items()},
        "exact": found.exact,
        "took_ms": found.took_ms,
        "extends": found.extends,
        "distances_computed": found.distances_computed,
        "seeds": list(found.seeds),
    }


def _show(found: "Found") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "document", "distance", box=None, padding=(0, 1, 0, 0))
    for rank, hit in enumerate(found.hits, 1):
        table.add_row(str(rank), Text(printable(hit.document_id)), f"{hit.distance:.6g}")
    shown = stdout_console()
    shown.print(table if found.hits else "no document is allowed by the filter")
    way = "exact" if found.exact else "approximate"
    shown.print(f"{found.shards - len(found.missing)} of {found.shards} shards, {way}")
    if found.seeds:
        shown.print(Text(printable(f"seeds: {' '.join(found.seeds)}")))
    for shard, error in found.missing.items():
        said = printable(f"shard {shard} is missing: {error.message}")
        shown.print(Text(said, style="yellow"))

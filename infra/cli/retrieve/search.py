"""Implements `trivium search`: one query to the retrieval pool, as words or as a vector."""

import asyncio
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, in_panel, settings_of_running
from infra.cli.retrieve.rows import read_vector
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.settings import LogSettings
    from streams.log.retrieval.results import Hit, RetrievalResult

_TEXT, _VECTOR = in_panel("Of --text"), in_panel("Of --vector and --file")
_USUAL = "the worker's setting"
_BY = {"hybrid": "vector and words", "vector": "vector", "words": "words"}


def search(
    vector: Annotated[
        str | None, typer.Option(help="A vector, numbers with commas: `--vector=0.1,-0.2`.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="A text to search for.")] = None,
    mode: Annotated[
        str | None,
        _TEXT(help="hybrid, vector or words: how to search for it.", show_default="hybrid"),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Search as this tenant; else as the operator.")] = "",
    min_score: Annotated[
        float | None,
        _TEXT(min=-1, max=1, help="Leave out passages with a lower cosine.", show_default="none"),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A .npy file with one vector.", dir_okay=False)
    ] = None,
    collection: Annotated[
        str, typer.Option("--collection", "-c", help="The collection to search.")
    ] = "default",
    k: Annotated[int, typer.Option("-k", help="Number of hits.")] = 10,
    where: Annotated[
        str, typer.Option("--filter", help="Conditions on metadata as JSON, see the examples.")
    ] = "",
    kind: Annotated[
        str, typer.Option("--class", help="Scheduling class: prefill or decode.")
    ] = "decode",
    top_m: Annotated[
        int | None,
        _VECTOR(min=0, help="Candidates to keep: more find more, slower.", show_default=_USUAL),
    ] = None,
    patience: Annotated[
        int | None,
        _VECTOR(min=0, help="Stop after so many steps without a change.", show_default=_USUAL),
    ] = None,
    seed: Annotated[
        list[str] | None, typer.Option(help="Document to begin at; may be repeated.")
    ] = None,
    wants_seeds: Annotated[
        bool, typer.Option("--seeds", help="Show seeds for the next search.")
    ] = False,
    deadline_ms: Annotated[
        int, typer.Option(min=1, help="Longest wait for the shards, ms.")
    ] = 5_000,
    config: Config = None,
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
) -> None:
    """Search a collection by text or vector.

    Find passages for a text, or the documents nearest to a vector, in all shards.

    Examples: `trivium search --text "when does the ferry leave" -c handbook`,
    `trivium search --file q.npy -c books --filter '{"year": {"$gte": 2020}}' --json`
    """
    from schemas.retrieval import MODES

    of_texts = {"mode": mode, "min_score": min_score}
    of_vectors = {"top_m": top_m, "patience": patience}
    options = of_vectors if text is None else of_texts
    if mode not in (None, *MODES):
        raise ConfigError(f"--mode: expected {', '.join(MODES)}, found {mode!r}")
    values = text if text is not None else vector_from(vector, file)
    if text is not None and (vector is not None or file is not None or not text.strip()):
        raise ConfigError("expected one of --text, --vector and --file, and not an empty one")
    _reject(*((of_texts, "a vector") if text is None else (of_vectors, "a text")))
    log = settings_of_running(config, bootstrap).log
    if kind not in ("prefill", "decode"):
        raise ConfigError(f"--class: expected prefill or decode, found {kind!r}")
    fields = {
        "collection": collection, "k": k, "filter": where, "kind": kind, "tenant": tenant,
        "seeds": seed or (), "wants_seeds": wants_seeds,
    }  # fmt: skip
    fields |= {name: value for name, value in options.items() if value is not None}
    results = asyncio.run(_search(log, values, deadline_ms, fields))
    if as_json:
        print_json(as_plain(results))
    else:
        _show(results)


def _reject(options: dict[str, Any], what: str) -> None:
    """Raise ConfigError if any option is given that has no effect on this kind of search."""
    for name, value in options.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: has no effect on a search for {what}; leave it out")


def vector_from(text: str | None, file: Path | None) -> Any:
    """Return the vector of the options; raises ConfigError unless exactly one is given."""
    import numpy as np

    if (text is None) == (file is None):
        raise ConfigError("expected one of --vector 0.1,0.2,... and --file vector.npy")
    if text is not None:
        try:
            return np.array([float(number) for number in text.split(",")], np.float32)
        except ValueError as error:
            raise ConfigError(f"--vector: expected numbers with commas: {error}") from error
    assert file is not None
    return read_vector(file)


async def _search(
    log: "LogSettings", values: Any, deadline_ms: int, fields: dict[str, Any]
) -> "RetrievalResult":
    from streams.log.clock import wall_ms
    from streams.log.registry import make_codec
    from streams.log.retrieval.client import open_retrieval_client

    codec = await asyncio.to_thread(make_codec, log)
    async with open_retrieval_client(log, codec, f"search-{os.getpid()}") as client:
        search: Any = client.search_text if isinstance(values, str) else client.search
        results: RetrievalResult = await search(
            values, deadline_ms=wall_ms() + deadline_ms, **fields
        )
        return results


def as_plain(results: "RetrievalResult") -> dict[str, Any]:
    """Return a result as JSON shows it."""
    return {
        "retrieval_id": results.retrieval_id,
        "hits": [_plain_hit(hit) for hit in results.hits],
        "shards": results.shards,
        "missing": {str(shard): error.message for shard, error in results.missing.items()},
        "exact": results.exact,
        "took_ms": results.took_ms,
        "extends": results.extends,
        "distances_computed": results.distances_computed,
        "seeds": list(results.seeds),
        "mode": results.mode,
        "degraded": results.degraded,
        "wait_ms": results.wait_ms,
        "embedded_ms": results.embedded_ms,
    }


def _plain_hit(hit: "Hit") -> dict[str, Any]:
    plain: dict[str, Any] = {"id": hit.document_id}
    if math.isfinite(hit.distance):
        plain["distance"] = hit.distance
    if hit.fused:
        plain |= {"score": hit.score, "fused": hit.fused, "cosine": hit.cosine, "words": hit.words}
    if (passage := hit.passage) is not None:
        names = ("document_id", "title", "source", "start", "text")
        plain["passage"] = {name: getattr(passage, name) for name in names}
    return plain


def _show(results: "RetrievalResult") -> None:
    from rich.text import Text

    console = stdout_console()
    if results.mode:
        _show_passages(results)
    else:
        _show_distances(results)
    accuracy = "exact" if results.exact else "approximate"
    by = f", by {_BY[results.mode]}" if results.mode else ""
    console.print(
        f"{results.shards - len(results.missing)} of {results.shards} shards, {accuracy}{by}"
    )
    if results.degraded:
        console.print(Text(printable(f"words alone: {results.degraded}"), style="yellow"))
    if results.seeds:
        console.print(Text(printable(f"seeds: {' '.join(results.seeds)}")))
    for shard, error in results.missing.items():
        warning = printable(f"shard {shard} is missing: {error.message}")
        console.print(Text(warning, style="yellow"))


def _show_passages(results: "RetrievalResult") -> None:
    """Print each passage with its source, as text to read."""
    from rich.padding import Padding
    from rich.text import Text

    console = stdout_console()
    for rank, hit in enumerate(results.hits, 1):
        passage, words = hit.passage, "" if hit.words is None else f"  words {hit.words:.2f}"
        cosine = "" if hit.cosine is None else f"  cosine {hit.cosine:.3f}"
        origin = " · ".join(filter(None, [passage.title, passage.source])) if passage else ""
        line = Text(f"{rank}  ").append(printable(hit.document_id), style="bold")
        console.print(line.append(f"{cosine}{words}  {printable(origin)}".rstrip(), style="dim"))
        if passage is not None and passage.text:
            console.print(Padding(Text(_in_lines(passage.text)), (0, 0, 1, 3)))
    if not results.hits:
        console.print("nothing was found")


def _in_lines(text: str) -> str:
    """Return an untrusted text with unprintable characters escaped, except line breaks."""
    return "\n".join(printable(line) for line in text.splitlines())


def _show_distances(results: "RetrievalResult") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "document", "distance", box=None, padding=(0, 1, 0, 0))
    for rank, hit in enumerate(results.hits, 1):
        table.add_row(str(rank), Text(printable(hit.document_id)), f"{hit.distance:.6g}")
    stdout_console().print(table if results.hits else "no document is allowed by the filter")

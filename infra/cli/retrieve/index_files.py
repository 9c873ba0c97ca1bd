"""Implements `trivium index`: builds, shows and checks index files, without a broker."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.cli.options import AsJson
from infra.cli.retrieve.rows import read_whole
from infra.terminal.output import print_json
from schemas.errors import ConfigError
from schemas.rules.sizes import SHARDS_MAX
from workers.vector.limits import DEGREE_MAX

app = typer.Typer(help="Build, show and check index files.", no_args_is_help=True)


@app.command(epilog="Example: trivium index build vectors.npy books.index --metric cosine")
def build(
    vectors: Annotated[
        Path, typer.Argument(help=".npy or .jsonl, as `ingest --vectors` takes it.")
    ],
    path: Annotated[Path, typer.Argument(help="The index file; {shard} becomes a number.")],
    metric: Annotated[
        str, typer.Option(help="Metric: sqeuclidean, inner_product or cosine.")
    ] = "cosine",
    storage: Annotated[
        str, typer.Option(help="Storage of vectors: float32 or float16.")
    ] = "float32",
    degree: Annotated[int, typer.Option(min=2, max=DEGREE_MAX, help="Edges of each row.")] = 32,
    seed: Annotated[int, typer.Option(help="Equal seeds build equal indexes.")] = 0,
    shards: Annotated[
        int, typer.Option(min=1, max=SHARDS_MAX, help="Number of files, which share the rows.")
    ] = 1,
    device: Annotated[
        str, typer.Option(help="Device that computes distances: cpu, cuda or auto.")
    ] = "cpu",
    builder: Annotated[str, typer.Option(help="Builder: own, or cuvs, which needs cuda.")] = "own",
    as_json: AsJson = False,
) -> None:
    """Build an index of vectors, for `index_files` of section [retrieval].

    Ids are those of a .jsonl file, or the row numbers of a .npy file. With several shards, shard i
    gets the rows i, i + shards and so on, and the path must contain {shard}.
    """
    from rich.console import Console

    from workers.retrieval.settings import SHARD_FIELD
    from workers.vector.engine import backend
    from workers.vector.index import snapshot
    from workers.vector.index.index import Index
    from workers.vector.kernels.metrics import Metric, Storage

    kinds = {"metric": (metric, Metric), "storage": (storage, Storage)}
    for option, (value, kind) in kinds.items():
        choices = [member.value for member in kind]
        if value not in choices:
            raise ConfigError(f"--{option}: expected one of {', '.join(choices)}, found {value!r}")
    if shards > 1 and SHARD_FIELD not in path.name:
        raise ConfigError(f"{path}: expected {SHARD_FIELD} in the name, with {shards} shards")
    graph_of = backend.graph_builder(device, builder)
    rows = read_whole(vectors)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: {path.absolute().parent} is no folder")
    began_s = time.monotonic()
    for shard in range(shards):
        file = path.with_name(path.name.replace(SHARD_FIELD, str(shard)))
        part = rows.part(shard, shards)
        with Console(stderr=True).status(f"building {len(part.ids)} rows"):
            index = Index(
                part.vectors.shape[1], metric=Metric(metric), storage=Storage(storage),
                degree=degree, seed=seed, graph_of=graph_of,
            )  # fmt: skip
            index.upsert(part.ids, part.vectors, part.metadata, part.payloads)
            index.link()
            try:
                snapshot.save(index, file, {"shard": f"{shard}/{shards}"})
            except OSError as error:
                raise ConfigError(f"{file}: cannot be written: {error}") from error
        took_s = round(time.monotonic() - began_s, 3)
        _print_report(
            {"path": str(file), "rows": len(index), "dim": index.dim, "took_s": took_s}, as_json
        )


@app.command(
    epilog="Examples: trivium index info books.index --json | jq .live, "
    "trivium index info books.index --verify && echo good"
)
def info(
    path: Annotated[Path, typer.Argument(help="The index file.", dir_okay=False)],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read the whole file, check its sums, and search for rows."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the header of an index file, without reading the vectors.

    `audit.missed_share` is the share of its own rows that searches did not find when it was
    written. With --verify, `missed_share` is that share now: of rows whose search found nothing as
    near as the row itself. Above 0.05, build the file again.
    """
    from workers.vector.index import snapshot

    if verify:
        index = _read(snapshot.load, path)
        missed = index.missed_share()
        report = {"path": str(path), "rows": len(index), "sums": "good", "found_itself": 1 - missed}
        _print_report({**report, "missed_share": missed}, as_json)
        return
    header = _read(snapshot.info, path)
    fields = {name: value for name, value in header.items() if name != "sections"}
    _print_report({"path": str(path), "bytes": path.stat().st_size, **fields}, as_json)


def _read(reader: Any, path: Path) -> Any:
    try:
        return reader(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _print_report(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for name, value in report.items():
        print(f"{name:12} {json.dumps(value) if isinstance(value, dict) else value}")

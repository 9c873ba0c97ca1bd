"""`trivium index`: index files without a broker: build one, look at it, check it."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.cli.options import AsJson
from infra.cli.retrieve.arrays import read_rows
from infra.terminal.output import print_json
from schemas.errors import ConfigError
from workers.search.limits import DEGREE_MAX

app = typer.Typer(help="Build, look at and check index files.", no_args_is_help=True)
Target = Annotated[Path, typer.Argument(help="The index file.", dir_okay=False)]


@app.command(epilog="Example: trivium index build vectors.npy books.index --metric cosine")
def build(
    vectors: Annotated[Path, typer.Argument(help="A .npy file, a vector in each row.")],
    path: Target,
    metric: Annotated[str, typer.Option(help="sqeuclidean, inner_product or cosine.")] = "cosine",
    storage: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    degree: Annotated[int, typer.Option(min=2, max=DEGREE_MAX, help="Edges of each row.")] = 32,
    seed: Annotated[int, typer.Option(help="Equal seeds build equal indexes.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto: who computes distances.")] = "cpu",
    builder: Annotated[str, typer.Option(help="own, or cuvs, which needs cuda.")] = "own",
    as_json: AsJson = False,
) -> None:
    """Build an index of vectors; ids are the numbers of the rows."""
    from rich.console import Console

    from workers.search.engine import backend
    from workers.search.index import snapshot
    from workers.search.index.index import Index
    from workers.search.kernels.metrics import Metric, Storage

    kinds = {"metric": (metric, Metric), "storage": (storage, Storage)}
    for option, (value, kind) in kinds.items():
        known = [each.value for each in kind]
        if value not in known:
            raise ConfigError(f"--{option}: expected one of {', '.join(known)}, found {value!r}")
    graph_of = backend.graph_builder(device, builder)
    data = read_rows(vectors)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: {path.absolute().parent} is no folder")
    began_s = time.monotonic()
    with Console(stderr=True).status(f"building {len(data)} rows"):
        index = Index.build(
            data, metric=Metric(metric), storage=Storage(storage), degree=degree, seed=seed,
            graph_of=graph_of,
        )  # fmt: skip
        try:
            snapshot.save(index, path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error}") from error
    told = {"path": str(path), "rows": len(index), "dim": index.dim}
    _tell({**told, "took_s": round(time.monotonic() - began_s, 3)}, as_json)


@app.command(epilog="Example: trivium index info books.index --json | jq .live")
def info(path: Target, as_json: AsJson = False) -> None:
    """Show what an index file holds, without reading the vectors.

    `audit.missed_share` says how many of its own rows searches did not find when it was written.
    """
    from workers.search.index import snapshot

    header = _read(snapshot.info, path)
    shown = {name: value for name, value in header.items() if name != "sections"}
    _tell({"path": str(path), "bytes": path.stat().st_size, **shown}, as_json)


@app.command(epilog="Example: trivium index verify books.index && echo good")
def verify(path: Target, as_json: AsJson = False) -> None:
    """Read an index file whole, check its sums, and search it for some of its own rows.

    `missed_share` of these found nothing as near as themselves; above 0.05 build the file anew.
    """
    from workers.search.index import snapshot

    index = _read(snapshot.load, path)
    missed = index.missed_share()
    told = {"path": str(path), "rows": len(index), "sums": "good", "found_itself": 1 - missed}
    _tell({**told, "missed_share": missed}, as_json)


def _read(reader: Any, path: Path) -> Any:
    try:
        return reader(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _tell(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        print(f"{name:12} {json.dumps(value) if isinstance(value, dict) else value}")

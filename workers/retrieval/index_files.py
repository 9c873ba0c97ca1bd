"""Reads the collections that are index files, which `trivium index build` writes.

A worker reads its shard's files when it starts and serves them unchanged. They take no documents
and are in no snapshot. A new file is used from the next start on.
"""

import logging
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, SnapshotError
from workers.retrieval.settings import SHARD_FIELD, RetrievalSettings, ShardPlace
from workers.vector.graph.build import GraphOf
from workers.vector.index import snapshot
from workers.vector.index.index import Index
from workers.vector.limits import TASKS_MAX

log = logging.getLogger("trivium.retrieval")


def read(settings: RetrievalSettings, place: ShardPlace, graph_of: GraphOf) -> dict[str, Index]:
    """Read a shard's indexes, by collection; raises ConfigError for a file that does not fit."""
    if place.shards > 1:
        _check_shards(settings, place)
    indexes = {}
    for name, path in settings.files(place.shard).items():
        try:
            header = snapshot.info(path)
            _check(settings, place, name, path, header)
            index = snapshot.load(path, threads=settings.lanes, graph_of=graph_of)
        except (SnapshotError, OSError) as error:
            raise ConfigError(f"retrieval.index_files, collection {name}: {error}") from error
        log.info("%s: %d rows of %s", path, len(index), name)
        indexes[name] = index
    return indexes


def _check_shards(settings: RetrievalSettings, place: ShardPlace) -> None:
    """Raise ConfigError if shards share a file: searches would find each row several times."""
    for pair in settings.index_files:
        if SHARD_FIELD not in pair:
            raise ConfigError(
                f"retrieval.index_files: expected {SHARD_FIELD} in the path where there are "
                f"{place.shards} shards, found {pair!r}; `trivium index build --shards "
                f"{place.shards}` writes a file for each"
            )


def _check(
    settings: RetrievalSettings, place: ShardPlace, name: str, path: Path, header: dict[str, Any]
) -> None:
    """Raise ConfigError if a file is of another shard, or contradicts the settings."""
    shard = header["notes"].get("shard", "0/1")
    actual = {"shard": shard, "metric": header["metric"], "storage": header["storage"]}
    expected = {
        "shard": str(place),
        "metric": settings.metric_of(name, default=header["metric"]),
        "storage": settings.storage_of(name, default=header["storage"]),
    }
    for what, value in expected.items():
        if actual[what] != value:
            raise ConfigError(f"{path}: expected {what} {value} of {name}, found {actual[what]}")
    if header["degree"] > TASKS_MAX:
        raise ConfigError(
            f"{path}: expected a degree of at most {TASKS_MAX}, found {header['degree']}"
        )
    if settings.device != "cpu" and header["dim"] > settings.cuda_dim_max:
        raise ConfigError(
            f"{path}: expected vectors of at most retrieval.cuda_dim_max ({settings.cuda_dim_max}) "
            f"values, found {header['dim']}"
        )

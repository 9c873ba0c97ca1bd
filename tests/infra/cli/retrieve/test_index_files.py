"""Collections that are read from index files, as `trivium index build` writes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError
from schemas.records import RetrievalRequest
from schemas.retrieval import pack_vector
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from tests.infra.cli.trivium_runner import trivium_here
from tests.waits import until
from tests.workers.retrieval.retrieval_workers import (
    SETTINGS,
    calm,
    dead_letter_reasons,
    library,
    ready,
    wait_for_documents,
    worker,
)
from tests.workers.vector.data import gaussian
from workers.retrieval import index_files
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.vector.graph.build import own_graph
from workers.vector.index.kinds import SearchKind

ROWS, DIM = 2_400, 80  # so many of a shard that they are walked, not scanned
VECTORS = gaussian(ROWS, DIM)


def build(tmp_path: Path, *options: str, name: str = "a.index") -> Path:
    """An index file of `VECTORS`, made by the command line."""
    lines = tmp_path / "rows.jsonl"
    with lines.open("w") as file:
        for number, vector in enumerate(VECTORS.tolist()):
            row = {"id": f"d{number}", "vector": vector, "metadata": {"even": number % 2 == 0}}
            file.write(json.dumps(row | {"text": f"text {number}"}) + "\n")
    command = ("index", "build", str(lines), str(tmp_path / name), "--metric", "sqeuclidean")
    code, _, errors = trivium_here(*command, *options)
    assert code == 0, errors
    return tmp_path / name


def read(*files: str, place: str = "0/1", **settings: Any) -> list[str]:
    """Collections that a worker reads."""
    worker_settings = replace(RetrievalSettings(), index_files=files, **settings)
    return list(index_files.read(worker_settings, ShardPlace.parse(place), own_graph))


def test_index_file_error_names_mismatch(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", VECTORS)
    full, half = tmp_path / "one.index", tmp_path / "{shard}.index"
    for path, options in ((full, ()), (half, ("--shards", "2"))):
        command = ("index", "build", str(tmp_path / "v.npy"), str(path), *options)
        assert trivium_here(*command)[0] == 0
    assert read(f"b={full}") == read(f"b={half}", place="1/2") == ["b"]
    bad = trivium_here("index", "build", str(tmp_path / "v.npy"), str(full), "--shards", "2")
    assert bad[0] == 2 and "expected {shard} in the name, with 2 shards" in bad[2]
    (tmp_path / "torn.index").write_bytes(full.read_bytes()[:9_000])
    for reason, file, place, settings in (
        ("expected {shard} in the path where there are 2 shards", str(full), "0/2", {}),
        ("expected shard 0/1 of b, found 0/2", f"{tmp_path}/0.index", "0/1", {}),
        ("expected metric inner_product of b", str(full), "0/1", {"metrics": ("b=inner_product",)}),
        ("expected storage float16 of b", str(full), "0/1", {"storages": ("b=float16",)}),
        ("collection b: .* No such file", f"{tmp_path}/none", "0/1", {}),
        ("collection b: .* no snapshot that can be read", f"{tmp_path}/torn.index", "0/1", {}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason.replace("{", r"\{").replace("}", r"\}")):
            read(f"b={file}", place=place, **settings)
    with pytest.raises(ConfigError, match="index_files: expected collection=path"):
        read("a/b=c")


def test_index_file_with_too_wide_vectors_for_device_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", gaussian(50, 40))
    path = tmp_path / "v.index"
    assert trivium_here("index", "build", str(tmp_path / "v.npy"), str(path))[0] == 0
    with pytest.raises(ConfigError, match=r"retrieval.cuda_dim_max \(16\) values, found 40"):
        read(f"b={path}", device="auto", cuda_dim_max=16)


@pytest.mark.kafka
async def test_retrieval_pool_searches_index_files(kafka: LogSettings, tmp_path: Path) -> None:
    """Over two shards, beside a collection of documents, and again from a snapshot."""
    files = (f"books={build(tmp_path, '--shards', '2', name='books-{shard}.index')}",)
    settings = replace(SETTINGS, index_files=files, snapshot_folder=str(tmp_path / "kept"))

    async def search_pool() -> None:
        async with (
            library(kafka) as books,
            worker(kafka, "one", "0/2", settings) as first,
            worker(kafka, "two", "1/2", settings) as second,
        ):
            await ready(books, 2)
            for number in (4, 7):
                result = await books.search(VECTORS[number], k=2)
                assert result.hits[0].document_id == f"d{number}" and not result.exact
            request = RetrievalRequest(
                retrieval_id="q", request_id="r", asker_id="a", reply_partition=0, k=1, asked_ms=0,
                vector=pack_vector(VECTORS[7]), deadline_ms=wall_ms() + 60_000, collection="books",
                wants_passages=True,
            )  # fmt: skip
            (passage,) = (await second.responder.hits(request, SearchKind.DECODE)).passages
            assert (passage.document_id, passage.text) == ("d7", "text 7")
            even = await books.ids(VECTORS[7], filter='{"even": true}')
            assert all(int(name[1:]) % 2 == 0 for name in even)
            await books.put({"late": VECTORS[0]})
            await books.put({"note": VECTORS[0]}, "notes")
            await until(lambda: "notes" in first.collections.indexes | second.collections.indexes)
            assert await books.ids(VECTORS[0], k=1) == ["d0"]
            assert sum(len(member.collections.of_documents()) for member in (first, second)) == 1
            await wait_for_documents(first, ROWS // 2)

    async with calm():
        await search_pool()
        await search_pool()
    reasons = await dead_letter_reasons(kafka, "documents")
    assert len(reasons) == 2, "one for each document, whoever reads it again"
    assert "collection 'books' is read from an index file and takes no documents" in reasons[0]

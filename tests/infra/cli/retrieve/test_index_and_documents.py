"""`trivium index`, `documents` and `search`, as somebody types them."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.cli.retrieve.documents import _check_dimensions
from infra.cli.retrieve.rows import VectorRow, open_rows, read_array, read_rows, read_vector
from infra.cli.retrieve.search import _show
from schemas.codec import Codec
from schemas.errors import ConfigError
from schemas.records import RetrievalRequest, WireError
from schemas.settings import LogSettings
from streams.log.clients import AssignedReader
from streams.log.retrieval.results import Hit, RetrievalResult
from tests.infra.cli.trivium_runner import Ran, trivium, trivium_here
from tests.long_leases import LONG_LEASES, long_leases
from tests.waits import until
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.retrieval.worker import RetrievalWorker

VECTORS = np.random.default_rng(0).standard_normal((200, 6)).astype(np.float32)


def test_search_output_escapes_document_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """Ids are arbitrary text: neither markup nor escape sequences may take effect."""
    names = ("[/red]", "a\x1b[2Jb")
    result = RetrievalResult(
        retrieval_id="r", hits=tuple(Hit(name, 0.5) for name in names), shards=2,
        missing={1: WireError(code="x", message="[/x]\x1b")}, exact=True, seeds=names, extends=1,
        distances_computed=1, took_ms=1.0,
    )  # fmt: skip
    _show(result)
    output = capsys.readouterr().out
    assert "\x1b" not in output and output.count("[/red]") == 2 and "[/x]\\x1b" in output


def test_index_command_builds_shows_and_verifies_file(tmp_path: Path) -> None:
    vectors, path = tmp_path / "v.npy", tmp_path / "v.index"
    np.save(vectors, VECTORS)
    code, output, errors = trivium_here(
        "index", "build", str(vectors), str(path), "--degree", "8", "--json"
    )
    assert code == 0, errors
    assert json.loads(output)["rows"] == 200
    info = json.loads(trivium_here("index", "info", str(path), "--json")[1])
    assert (info["rows"], info["dim"], info["metric"]) == (200, 6, "cosine")
    checked = json.loads(trivium_here("index", "info", "--verify", str(path), "--json")[1])
    assert (checked["sums"], checked["found_itself"]) == ("good", 1.0)
    assert info["audit"]["missed_share"] == checked["missed_share"] == 0.0
    astray = trivium_here("index", "build", str(vectors), str(tmp_path / "none" / "v.index"))
    assert astray[0] == 2 and "none is no folder" in astray[2]
    np.save(vectors, np.where(VECTORS > 2, np.nan, VECTORS))
    refused = trivium_here("index", "build", str(vectors), str(path))
    assert refused[0] == 2 and "expected finite values" in refused[2]
    path.write_bytes(path.read_bytes()[:5_000])
    cut = trivium_here("index", "info", "--verify", str(path))
    assert cut[0] == 2 and "no snapshot that can be read" in cut[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("search",), "expected one of --vector"),
        (("search", "--vector", "a,b"), "--vector: expected numbers"),
        (("search", "--vector=1", "--class", "cook"), "--class: expected prefill or decode"),
        (("ingest", "--vectors", "x.txt"), "a file that ends in .npy or .jsonl"),
        (("ingest", "--vectors", "none.npy"), "none.npy: cannot be read"),
        (("index", "info", "none.index"), "none.index: cannot be read"),
        (("run", "retrieval", "--shard", "2/2"), "--shard: expected SHARD/SHARDS"),
        (("run", "worker", "--role", "retrieval"), "--role: expected prefill, decode, replica"),
        (("up", "--retrieval", "1", "--shards", "2"), "shards: expected 1 to 1"),
    ],
)
def test_retrieval_commands_reject_bad_arguments_in_one_line(
    arguments: tuple[str, ...], message: str
) -> None:
    code, _, errors = trivium_here(*arguments)
    assert code == 2
    assert message in errors and len(errors.splitlines()) == 1


def test_vector_file_error_describes_content(tmp_path: Path) -> None:
    text, empty, several = tmp_path / "t.npy", tmp_path / "e.npy", tmp_path / "s.npz"
    text.write_text("no array")
    empty.touch()
    np.savez(several, a=VECTORS, b=VECTORS)
    for path in (text, empty):
        with pytest.raises(ConfigError, match="npy: expected a .npy file with numbers") as raised:
            read_array(path)
        assert "pickle" not in raised.value.message  # numpy's advice is to run what is in there
    with pytest.raises(ConfigError, match="s.npz: expected one array of numbers, found several"):
        read_array(several)
    np.save(text, np.array(["a"]))
    with pytest.raises(ConfigError, match="expected one array of numbers, found <U1"):
        read_array(text)
    np.save(text, VECTORS)
    assert read_rows(text).shape == VECTORS.shape
    with pytest.raises(ConfigError, match=r"expected one vector, found shape \(200, 6\)"):
        read_vector(text)
    np.save(text, VECTORS[:1])
    assert read_vector(text).shape == (6,)


def test_document_loader_rejects_vector_of_other_dimension() -> None:
    numbered_rows: list[tuple[str, Any]] = [
        ("row 0", "no vector"),
        ("row 1", VectorRow("a", VECTORS[0])),
        ("row 2", VectorRow("b", VECTORS[1][:4])),
        ("row 3", VectorRow("c", VECTORS[2])),
    ]
    rows = [row for _, row in _check_dimensions(iter(numbered_rows), "books", 0)]
    assert [row[0] for row in rows] == ["n", "a", "d", "c"]
    assert re.match("document 'b': expected a vector of 6 values, .*found 4", str(rows[2]))


@pytest.mark.parametrize(
    "line",
    [
        "[1]", "{", '{"id": "a"}', '{"vector": [1]}', '{"id": "a", "vector": []}',
        '{"id": "a", "vector": [1, NaN]}', '{"id": "a", "vector": [1, null]}',
        '{"id": "a", "vector": [1e39]}', '{"id": "a", "vector": [[1]]}',
        '{"id": "a", "vector": "12"}', '{"id": "\\ud800", "vector": [1]}',
        '{"id": "a", "vector": [1], "text": 7}', '{"id": "a", "vector": [1], "text": "\\ud800"}',
        '{"id": "a", "vector": [1], "metadata": [1]}',
        '{"id": 1.10, "vector": [1]}', '{"id": null, "vector": [1]}',
        '{"id": ["x"], "vector": [1]}', '{"id": true, "vector": [1]}',
        '{"id": "a", "vector": [1], "metadata": {"n": 0.12345678901234567}}',
        '{"id": "a", "vector": [1], "metadata": {"n": [1e1000000]}}',
        pytest.param('{"id": "a", "vector": ' + "[" * 5_000 + "]" * 5_000 + "}", id="nested"),
    ],
)  # fmt: skip
def test_document_loader_names_bad_line(tmp_path: Path, line: str) -> None:
    """Workers would dead-letter the line, and the user would not learn of it."""
    file = tmp_path / "books.jsonl"
    good = '{"id": 7, "vector": [1, 2.50000000000000000001], "metadata": {"year": 2020.50}}'
    file.write_text(f"{good}\n\n{line}")
    count, rows = open_rows(file)
    (_, first), (place, wrong) = rows
    assert not isinstance(first, str)
    name, vector, metadata, text = first
    assert (count, name, vector.tolist(), text) == (2, "7", [1, 2.5], "")
    assert metadata == '{"year": 2020.5}'
    assert place.endswith("books.jsonl, line 3")
    assert str(wrong).startswith("expected an object with an id")


def test_document_loader_names_bad_vector_row(tmp_path: Path) -> None:
    file = tmp_path / "books.npy"
    np.save(file, [[1.0, 2.0], [np.inf, 0.0]])
    count, rows = open_rows(file)
    (_, first), (place, wrong) = rows
    assert count == 2 and not isinstance(first, str) and first[1].tolist() == [1, 2]
    assert place.endswith("books.npy, row 1") and "expected finite values" in wrong
    np.save(file, np.empty((3, 0)))
    with pytest.raises(ConfigError, match=r"found shape \(3, 0\)"):
        open_rows(file)


@pytest.fixture
def lasting() -> Iterator[None]:
    with long_leases():
        yield


@pytest.mark.kafka
@pytest.mark.usefixtures("lasting")
async def test_documents_command_loads_searchable_documents(
    kafka: LogSettings, tmp_path: Path
) -> None:
    lines = [
        json.dumps({"id": f"d{i}", "vector": row.tolist(), "metadata": {"part": i % 2}})
        for i, row in enumerate(VECTORS)
    ]
    (tmp_path / "v.jsonl").write_text("\n".join(lines) + "\n")
    np.save(tmp_path / "q.npy", VECTORS[7])
    config = tmp_path / "c.toml"
    config.write_text(
        f'[log]\ntopic_prefix = "{kafka.topic_prefix}"\n'
        "retrieval_partitions = 2\nasker_partitions = 2\ndocument_partitions = 2\n"
    )
    common = ("-c", "books", "--config", str(config), "--bootstrap", kafka.bootstrap, "--json")
    patience = ("--deadline-ms", "100000")
    search = ("search", "--file", str(tmp_path / "q.npy"), "-k", "3", *patience, *common)

    async def run(*arguments: str) -> Ran:
        return await asyncio.to_thread(trivium, *arguments, env=LONG_LEASES)

    alone = await run(*search)
    assert alone[0] == 2 and "no retrieval worker is ready" in alone[2]
    stop = asyncio.Event()
    worker = RetrievalWorker(kafka, RetrievalSettings(), ShardPlace(0, 1), "r", Codec())
    life = asyncio.create_task(worker.run(stop))
    try:
        load = ("ingest", "--vectors", str(tmp_path / "v.jsonl"), *common)
        loaded = await run(*load)
        summary = {"collection": "books", "documents": 200, "refused": 0, "replaced": 0}
        assert json.loads(loaded[1]) == summary
        await until(lambda: sum(state.documents for state in worker.collections.states()) == 200)
        members = worker.membership.view.members
        await until(lambda: "r" in members and members["r"].state == "ready")  # in the log
        searched = await run(*search)
        assert searched[0] == 0, searched[2]
        answer = json.loads(searched[1])
        assert answer["hits"][0]["id"] == "d7" and answer["missing"] == {}
        even = (*search, "--filter", '{"part": 0}')
        answer = json.loads((await run(*even))[1])
        assert len(answer["hits"]) == 3
        assert all(int(hit["id"][1:]) % 2 == 0 for hit in answer["hits"])
        await until(lambda: (beat := members["r"].search) is not None and beat.searches_total == 2)
        await check_options(kafka, run, search)
        status = await run("status", *common[2:])
        (worker_row,) = [m for m in json.loads(status[1]) if m["kind"] == "worker"]
        assert worker_row["shard"]["shards"] == 1
        assert worker_row["search"]["searches_total"] == 3
        row = '"vector": [1, 2, 3, 4, 5, 6]'
        lines = [
            '{"id": "x", "vector": [1, 2]}',
            f'{{"id": "y", {row}, "metadata": {{"a": {{"b": 1}}}}}}',
            f'{{"id": "y", {row}, "metadata": {{"n": 1234567890123456789}}}}',
            f'{{"id": 7, {row}}}',
            f'{{"id": "7", {row}}}',
        ]
        (tmp_path / "v.jsonl").write_text("\n".join(lines))
        short = await run(*load)
        assert short[0] == 1 and json.loads(short[1])["refused"] == 3
        assert json.loads(short[1])["documents"] == json.loads(short[1])["replaced"] == 1
        for number, reason in (
            (1, "expected a vector of 6 values"), (2, "found an object"), (3, "store it as text")
        ):  # fmt: skip
            (message,) = [text for text in short[2].split("\n") if f"line {number}: " in text]
            assert reason in message
        wrong = await run("search", "--vector=1,2", *patience, *common)
        assert wrong[:2] == (2, "")
        assert "expected vectors of 6 values, found shape (2,)" in wrong[2]
    finally:
        stop.set()
        await life


async def check_options(
    kafka: LogSettings, run: Callable[..., Awaitable[Ran]], search: tuple[str, ...]
) -> None:
    """Options of the search command are fields of the retrieval request on the log."""
    options = ("--class", "prefill", "--top-m", "64", "--patience", "9", "--seeds")
    run_result = await run(*search, *options, "--seed", "d7", "--seed", "d8")
    assert run_result[0] == 0, run_result[2]
    answer = json.loads(run_result[1])
    assert answer["hits"][0]["id"] == "d7"
    assert "d7" in answer["seeds"]
    requests = []
    for partition in range(2):
        reader = AssignedReader(kafka, "retrieval.prefill", [partition], client_id="looker")
        await reader.start("earliest")
        try:
            requests += [
                Codec().decode(record.value or b"") for record in await reader.read_to_end()
            ]
        finally:
            await reader.stop()
    (request,) = requests
    assert isinstance(request, RetrievalRequest)
    assert (request.top_m, request.patience, request.wants_seeds) == (64, 9, True)
    assert request.seeds == ("d7", "d8")

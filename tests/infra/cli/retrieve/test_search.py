"""What the search commands ask for, and tell; no broker."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from infra.cli.operate.status import _collection
from infra.cli.retrieve.index_files import info
from schemas.settings import LogSettings
from tests.infra.cli.trivium_runner import trivium_here
from tests.workers.vector.data import gaussian
from workers.retrieval.collections import Collections
from workers.retrieval.settings import RetrievalSettings
from workers.vector.index import snapshot
from workers.vector.index.index import Index
from workers.vector.index.view import IndexAudit


def test_missed_share_is_reported_by_status_and_verify(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`trivium index info --verify` measures it again; workers and `trivium status` report it."""
    collections = Collections(RetrievalSettings())
    collections.indexes["books"] = index = Index.build(gaussian(100, 4), degree=8)
    snapshot.save(index, tmp_path / "index")
    index.audit = IndexAudit(rows=100, entries=9, rounds=1, missed_share=0.25)
    (state,) = collections.states()
    assert state.missed_share == 0.25
    assert _collection(asdict(state)) == "books 100 (25.0% not found)"
    assert _collection({**asdict(state), "missed_share": 0.001}) == "books 100"
    monkeypatch.setattr(Index, "missed_share", lambda self: 0.5)
    info(tmp_path / "index", verify=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["missed_share"] == 0.5


def test_search_command_sends_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_fields: list[dict[str, Any]] = []

    async def fake_search(log: LogSettings, values: Any, deadline_ms: int, fields: Any) -> None:
        sent_fields.append(fields)

    module = importlib.import_module("infra.cli.retrieve.search")
    monkeypatch.setattr(module, "_search", fake_search)
    monkeypatch.setattr(module, "_show", lambda results: None)
    options = {"kind": "prefill", "top_m": 7, "patience": 3, "wants_seeds": True}
    module.search(vector="1,2", seed=["a"], **options)
    (fields,) = sent_fields
    assert {name: fields[name] for name in (*options, "seeds")} == {**options, "seeds": ["a"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--text", "x", "--top-m", "8"), "--top-m: has no effect on a search for a text"),
        (("--text", "x", "--patience", "2"), "--patience: has no effect on a search for a text"),
        (("--vector", "1,2", "--mode", "words"), "--mode: has no effect on a search for a vector"),
        (("--vector", "1", "--min-score", "0.5"), "--min-score: has no effect on a search for a"),
        (("--text", "x", "--mode", "all"), "--mode: expected "),
        (("--text", "x", "--vector", "1"), "expected one of --text, --vector and --file"),
    ],
)
def test_search_command_rejects_options_without_effect(
    options: tuple[str, ...], message: str
) -> None:
    code, _, errors = trivium_here("search", *options, "--bootstrap", "127.0.0.1:1")
    assert (code, message in errors) == (2, True), errors

"""What the search commands ask for, and tell; no broker."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from infra.cli.operate.status import _collection
from infra.cli.retrieve.index_files import verify
from schemas.settings import LogSettings
from tests.workers.search.data import gaussian
from workers.search.index import snapshot
from workers.search.index.index import Index
from workers.search.index.view import IndexAudit
from workers.search.service.collections import Collections
from workers.search.service.settings import RetrievalSettings


def test_what_searches_miss_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By workers to the fleet, by `trivium status` and by `trivium index verify`, which looks for
    itself."""
    held = Collections(RetrievalSettings())
    held.indexes["books"] = index = Index.build(gaussian(100, 4), degree=8)
    snapshot.save(index, tmp_path / "index")
    index.audit = IndexAudit(rows=100, entries=9, rounds=1, missed_share=0.25)
    (state,) = held.states()
    assert state.missed_share == 0.25
    assert _collection(asdict(state)) == "books 100 (25.0% not found)"
    assert _collection({**asdict(state), "missed_share": 0.001}) == "books 100"
    monkeypatch.setattr(Index, "missed_share", lambda self: 0.5)
    verify(tmp_path / "index", as_json=True)
    assert json.loads(capsys.readouterr().out)["missed_share"] == 0.5


def test_what_a_search_asks_for_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Class, top_m, patience and seeds."""
    sent: list[dict[str, Any]] = []

    async def asked(log: LogSettings, values: Any, deadline_ms: int, fields: Any) -> None:
        sent.append(fields)

    module = importlib.import_module("infra.cli.retrieve.search")
    monkeypatch.setattr(module, "_search", asked)
    monkeypatch.setattr(module, "_show", lambda found: None)
    wanted = {"kind": "prefill", "top_m": 7, "patience": 3, "wants_seeds": True}
    module.search(vector="1,2", seed=["a"], **wanted)
    (fields,) = sent
    assert {name: fields[name] for name in (*wanted, "seeds")} == {**wanted, "seeds": ["a"]}

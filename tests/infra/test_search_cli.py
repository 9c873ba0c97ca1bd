"""What `trivium search` makes of its options; no broker."""

import importlib
from typing import Any

import pytest

from schemas.settings import LogSettings


def test_what_a_search_asks_for_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Class, top_m, patience and seeds (issue 10, 27)."""
    sent: list[dict[str, Any]] = []

    async def asked(log: LogSettings, values: Any, deadline_ms: int, fields: Any) -> None:
        sent.append(fields)

    module = importlib.import_module("infra.cli.search")
    monkeypatch.setattr(module, "_search", asked)
    monkeypatch.setattr(module, "_show", lambda found: None)
    wanted = {"kind": "prefill", "top_m": 7, "patience": 3, "wants_seeds": True}
    module.search(vector="1,2", seed=["a"], **wanted)
    (fields,) = sent
    assert {name: fields[name] for name in (*wanted, "seeds")} == {**wanted, "seeds": ["a"]}

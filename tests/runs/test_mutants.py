"""Mutants of a small tree, made and run by mutmut: its notes are what a report is made of."""

from pathlib import Path
from typing import Any

import pytest

from tests.runs import mutants
from tests.runs.mutants import FOLDERS, Area, report

CODE = "def price(count: int, each: int) -> int:\n    return count * each + len([each] * 2)\n"
TEST = "from streams.core.prices import price\n\ndef test_price():\n    assert price(0, 5) == 2\n"
SURVIVOR = "price: - return count * each + len([each] * 2) + return count / each + len([each] * 2)"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    for path, text in {
        "streams/core/prices.py": CODE,
        "tests/streams/core/test_prices.py": TEST,
        "tests/runs/mutants.py": Path(mutants.__file__).read_text(),
        "pyproject.toml": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "BUILD", tmp_path / "build")
    monkeypatch.setattr(mutants, "RESULTS", tmp_path / "mutants.json")
    return tmp_path


def findings() -> tuple[int, dict[str, Any]]:
    status = Area("streams/core").run(["streams/core/prices.py"], 1, rerun_survivors=False)
    return status, report()


def test_mutants_report_lists_survivors(tree: Path) -> None:
    status, mutant_report = findings()
    assert status == 0 and mutant_report["survivors"] == {"streams/core/prices.py": [SURVIVOR]}
    assert mutant_report["total"] == {"killed": 1, "survived": 1} and mutant_report["score"] == 50.0

"""The library is used alone, as its page says."""

from pathlib import Path
from typing import Any

import pytest

from tests.page_blocks import blocks


def test_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "workers/vector/README.md"
    [block] = [block for block in blocks("python") if block.page == page]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block.text, names)
    assert names["found"][0] == ["new"] and names["found"][1][:2] == ["row 0", "new"]
    assert names["rows"].shape == names["distances"].shape == (100, 10)
    assert len(names["index"]) == 2_001 and (tmp_path / "vectors.index").exists()

"""What a change of a schema must keep: each break is named, and there is none."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from schemas.codec import HISTORY_DIR, MARKS_FILE, full_schema
from schemas.generate.compatibility import (
    RELEASED_FILE,
    incompatibilities,
    marks_text,
    released_marks,
    unreadable,
)

USAGE = full_schema("Usage")


def with_field(**field: Any) -> dict[str, Any]:
    return {**USAGE, "fields": [*USAGE["fields"], {"name": "more", "doc": "", **field}]}


def test_current_schemas_have_no_incompatibilities() -> None:
    assert list(incompatibilities()) == []
    assert released_marks()


@pytest.mark.parametrize(
    ("reader", "writer", "why"),
    [
        (with_field(type="string"), USAGE, "reader field missing default value: more"),
        ({**USAGE, "name": "Used"}, USAGE, "name mismatch"),
        (with_field(type="long"), with_field(type="string"), "type mismatch"),
        (
            with_field(type={"type": "enum", "name": "E", "symbols": ["A"]}),
            with_field(type={"type": "enum", "name": "E", "symbols": ["A", "B"]}),
            "missing enum symbols: {'B'}",
        ),
    ],
)
def test_unreadable_states_why_reader_fails(reader: Any, writer: Any, why: str) -> None:
    assert why in unreadable(reader, writer)


@pytest.mark.parametrize(
    ("reader", "writer"),
    [
        (USAGE, with_field(type="string")),
        (with_field(type="string", default=""), USAGE),
        (with_field(type="long"), with_field(type="int")),
        (with_field(type=["null", "string"]), with_field(type="string")),
    ],
)
def test_unreadable_is_empty_for_compatible_schemas(reader: Any, writer: Any) -> None:
    assert unreadable(reader, writer) == ""


def test_incompatibilities_name_missing_released_version(tmp_path: Path) -> None:
    """The change of a schema did not keep the version before."""
    history = copytree(HISTORY_DIR, tmp_path / "history")
    released = json.loads((history / RELEASED_FILE.name).read_text())
    released["records"]["Usage"] = "00"
    (history / RELEASED_FILE.name).write_text(json.dumps(released))
    (reason,) = incompatibilities(history)
    assert "Usage: version 00 was released" in reason
    (history / "Usage.00.avsc").write_text(json.dumps(USAGE))
    assert list(incompatibilities(history)) == []


def test_incompatibilities_name_version_that_current_one_cannot_read(tmp_path: Path) -> None:
    history = copytree(HISTORY_DIR, tmp_path / "history")
    schema = {**USAGE, "fields": [{**USAGE["fields"][0], "type": "double"}]}
    (history / "Usage.00.avsc").write_text(json.dumps(schema))
    orphan_schema = {"type": "record", "name": "Gone", "fields": []}
    (history / "Gone.00.avsc").write_text(json.dumps(orphan_schema))
    report = "\n".join(incompatibilities(history))
    assert "Usage: the current version cannot read version 00: type mismatch" in report
    assert "Gone: is gone" in report


def test_release_file_is_in_history_and_names_version() -> None:
    assert RELEASED_FILE.parent == HISTORY_DIR
    assert json.loads(RELEASED_FILE.read_text())["version"]


def test_committed_marks_are_current() -> None:
    assert MARKS_FILE.read_text() == marks_text(), "run `make schemas` and commit what it writes"

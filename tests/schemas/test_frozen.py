"""`@frozen`: kept by the type checker, and cheap to make."""

from dataclasses import fields, replace
from pathlib import Path

from mypy import api

from schemas.frozen import frozen

CHANGE = """
from schemas.records import Lease

lease = Lease(topic="tokens", partition=1)
lease.partition = 2
"""


@frozen
class Point:
    """Something frozen."""

    x: int
    y: int = 2


def test_frozen_class_is_slotted_keyword_only_and_hashed_by_fields() -> None:
    point = Point(x=1)
    assert (point.x, point.y) == (1, 2) and not hasattr(point, "__dict__")
    assert all(field.kw_only for field in fields(point))
    assert {point, replace(point, y=2)} == {point} != {replace(point, y=3)}


def test_type_checker_rejects_change_of_record(tmp_path: Path) -> None:
    """Nothing stops the change at run time; `make check` does."""
    file = tmp_path / "change.py"
    file.write_text(CHANGE)
    output, _, _ = api.run([str(file), "--follow-imports=silent", f"--cache-dir={tmp_path}"])
    assert 'Property "partition" defined in "Lease" is read-only' in output

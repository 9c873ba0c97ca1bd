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


def test_it_is_slotted_by_keyword_compared_and_hashed_by_its_fields() -> None:
    point = Point(x=1)
    assert (point.x, point.y) == (1, 2) and not hasattr(point, "__dict__")
    assert all(field.kw_only for field in fields(point))
    assert {point, replace(point, y=2)} == {point} != {replace(point, y=3)}


def test_the_type_checker_finds_who_changes_a_record(tmp_path: Path) -> None:
    """Nothing stops it at run time: `make check` does."""
    file = tmp_path / "change.py"
    file.write_text(CHANGE)
    found, _, _ = api.run([str(file), "--follow-imports=silent", f"--cache-dir={tmp_path}"])
    assert 'Property "partition" defined in "Lease" is read-only' in found

"""The kept fingerprints are those of the schemas."""

from schemas.codec import MARKS_FILE
from schemas.generate.marks import marks_text


def test_committed_marks_are_current() -> None:
    assert MARKS_FILE.read_text() == marks_text(), "run `make schemas` and commit what it writes"

"""Generates `schemas/marks.json`, the fingerprint of each record's schema, so that starts are fast.

`make schemas` writes it; a test fails when it is stale.
"""

import json

from schemas.codec import MARKS_FILE
from schemas.compatibility import current_marks


def marks_text() -> str:
    """Return the text of `schemas/marks.json`."""
    return json.dumps(current_marks(), indent=2) + "\n"


if __name__ == "__main__":
    MARKS_FILE.write_text(marks_text())

"""What metadata say, and what is refused of them."""

import pytest

from schemas.errors import InvalidRequest
from workers.retrieval.passages.changes import metadata_of

THIRD = "0.333333333333333314829616256247390992939472198486328125"  # a float, written whole


def test_metadata_rejects_numbers_beyond_float_digits() -> None:
    """Otherwise another number would be found in its place."""
    metadata = f'{{"n": 12.50, "e": 1e5, "at": 1.2345678901234567, "third": {THIRD}}}'
    assert metadata_of(metadata) == {"n": 12.5, "e": 1e5, "at": 1.2345678901234567, "third": 1 / 3}
    for number in ("0.1234567890123456789", "1234567890.12345678901", "1e999"):
        with pytest.raises(InvalidRequest, match="has more digits than a float; store it as text"):
            metadata_of(f'{{"n": {number}}}')

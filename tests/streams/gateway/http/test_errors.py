"""How values are shown in messages."""

from streams.gateway.http.errors import shown


def test_what_was_found_is_shown_whatever_it_is() -> None:
    """Python writes no number of 4 301 digits, and raises instead (issue 10, 23)."""
    for value in (10**4_301, -(10**9_000), [10**4_301], {"n": 10**5_000}):
        assert "a number of very many digits" in shown(value)
    assert len(shown("x" * 10_000)) < 100

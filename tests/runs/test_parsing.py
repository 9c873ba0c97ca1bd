"""That a traceback which garbage writes never disturbs a parse, as `parsing.py` has it."""

import ast
import gc
import traceback
from collections.abc import Iterator

import pytest

SOURCE = "\n".join(f"x{number} = [{number}, y + {number}]" for number in range(500))


class Garbage:
    """A cycle that writes a traceback when it is collected, and leaves another one."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        try:
            _ = [1][len("a")]
        except IndexError:
            traceback.format_exc()
        if LEFT:
            LEFT.pop()
            Garbage()


LEFT: list[int] = []


@pytest.fixture
def frequent_collection() -> Iterator[None]:
    """Garbage is looked for at each twentieth new object, a hundred times in this test."""
    before = gc.get_threshold()
    gc.set_threshold(20)
    LEFT.extend(range(100))
    Garbage()
    yield
    LEFT.clear()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("frequent_collection")
def test_parse_completes_during_garbage_collection() -> None:
    for _ in range(20):
        assert len(ast.parse(SOURCE).body) == 500
    assert gc.isenabled()


@pytest.mark.usefixtures("frequent_collection")
def test_parse_without_patch_fails_during_garbage_collection() -> None:
    """The unpatched parser fails here, so the test above proves something."""
    original_parse = ast.parse.__wrapped__  # type: ignore[attr-defined]  # of functools.wraps
    try:
        for _ in range(1_000):
            original_parse(SOURCE)
    except SystemError as error:
        assert "recursion depth mismatch" in str(error)
    else:
        pytest.skip("this Python parses whole: parsing.py can go")

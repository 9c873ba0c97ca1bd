"""What the cells of the serving benchmark ask, and when a load is kept up."""

from typing import Any

import pytest

from infra.bench.serving.cells import keeps_up, make_bodies
from tests.infra.bench.serving.made_up_cells import cell


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (cell(95, 20), True),
        (cell(80, 20), False),
        (cell(99, 600), False),
        (cell(99, 20, unfinished=1), False),
    ],
)
def test_keeping_up(found: dict[str, Any], kept: bool) -> None:
    assert keeps_up(100, found) is kept


def test_bodies_are_the_same_for_a_seed() -> None:
    assert make_bodies(1) == make_bodies(1) != make_bodies(2)
    assert len(set(make_bodies(1))) == len(make_bodies(1))

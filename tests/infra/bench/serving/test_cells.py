"""What the cells of the serving benchmark ask, and when a load is kept up."""

from typing import Any

import pytest

from infra.bench.serving.cells import keeps_up, make_bodies
from tests.infra.bench.serving.made_up_cells import cell


@pytest.mark.parametrize(
    ("figures", "keeps_pace"),
    [
        (cell(95, 20), True),
        (cell(80, 20), False),
        (cell(99, 600), False),
        (cell(99, 20, unfinished=1), False),
    ],
)
def test_keeps_up_requires_rate_ttft_and_whole_answers(
    figures: dict[str, Any], keeps_pace: bool
) -> None:
    assert keeps_up(100, figures) is keeps_pace


def test_make_bodies_repeats_by_seed() -> None:
    assert make_bodies(1) == make_bodies(1) != make_bodies(2)
    assert len(set(make_bodies(1))) == len(make_bodies(1))

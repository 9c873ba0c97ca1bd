"""What the benchmark of killed decode workers makes of what its clients saw."""

import pytest

from infra.bench.faults.http_clients import WHOLE, ClientAnswer
from infra.bench.faults.pauses import ANEW, GOES_ON, bars, pauses


def seen(*times_s: float, ended: str = WHOLE) -> ClientAnswer:
    return ClientAnswer(client=GOES_ON, times_s=list(times_s), status=ended)


def test_a_pause_is_the_longest_silence_of_an_answer_that_was_interrupted() -> None:
    found = pauses([seen(0, 0.5, 3.5, 4), seen(0, 2.5), seen(0, 0.5, 2), seen(0, 4, ended="")])
    assert found == {"interrupted": 3, "not_whole": 1, "median_s": 3.0, "max_s": 4.0}
    assert pauses([seen(0, 0.1)])["median_s"] is None


@pytest.mark.parametrize(
    ("last_s", "lost", "met"), [(3.9, 0, True), (4.1, 0, False), (3, 1, False)]
)
def test_answers_that_go_on_have_no_longer_pause_the_longer_they_are(
    last_s: float, lost: int, met: bool
) -> None:
    def row(median_s: float) -> dict[str, dict[str, float]]:
        return {GOES_ON: {"median_s": median_s, "not_whole": lost}, ANEW: {"not_whole": 0}}

    assert all(bar.met for bar in bars({"100": row(2.6), "4000": row(last_s)})) is met

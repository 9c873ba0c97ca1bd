"""What the benchmark of killed decode workers makes of what its clients saw."""

import pytest

from infra.bench.faults.http_clients import WHOLE, ClientAnswer
from infra.bench.faults.pauses import ANEW, GOES_ON, bars, pauses


def client_answer(*times_s: float, status: str = WHOLE) -> ClientAnswer:
    return ClientAnswer(client=GOES_ON, times_s=list(times_s), status=status)


def test_pauses_measure_longest_silence_of_interrupted_answers() -> None:
    summary = pauses(
        [
            client_answer(0, 0.5, 3.5, 4),
            client_answer(0, 2.5),
            client_answer(0, 0.5, 2),
            client_answer(0, 4, status=""),
        ]
    )
    assert summary == {"interrupted": 3, "not_whole": 1, "median_s": 3.0, "max_s": 4.0}
    assert pauses([client_answer(0, 0.1)])["median_s"] is None


@pytest.mark.parametrize(
    ("last_s", "not_whole", "met"), [(3.9, 0, True), (4.1, 0, False), (3, 1, False)]
)
def test_bars_require_pause_independent_of_answer_length(
    last_s: float, not_whole: int, met: bool
) -> None:
    def row(median_s: float) -> dict[str, dict[str, float]]:
        return {GOES_ON: {"median_s": median_s, "not_whole": not_whole}, ANEW: {"not_whole": 0}}

    assert all(bar.met for bar in bars({"100": row(2.6), "4000": row(last_s)})) is met

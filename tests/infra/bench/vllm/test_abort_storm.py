"""What the benchmark makes of a storm of clients that hang up."""

from typing import Any

import pytest

from infra.bench.vllm.abort_storm import AFTER_S, BIN_S, Loop, bars, recovery

BEFORE = (0.0, 20.0)


def recovered(*per_bin: int) -> dict[str, Any]:
    """Of two answers per second before, and so many in each bin after second 24."""
    no_client: Any = None
    ended_s = [number / 2 for number in range(40)]
    for number, count in enumerate(per_bin):
        ended_s += [24 + BIN_S * (number + n / (count + 1)) for n in range(count)]
    return recovery(Loop(no_client, [], "", ended_s=ended_s), BEFORE, 24.0)


def test_recovery_starts_at_first_bin_with_enough_answers() -> None:
    result = recovered(1, 9, 10, 10, 10, 8)
    assert result["answers_per_s_before"] == 2
    assert result["share_by_bin"] == [0.1, 0.9, 1, 1, 1, 0.8]
    assert len(result["share_by_bin"]) == AFTER_S / BIN_S
    assert (result["back_s"], result["share_later"]) == (10, 0.95)


def test_recovery_reports_rate_that_never_returns() -> None:
    assert recovered(1, 2, 3, 3, 3, 3)["back_s"] is None


@pytest.mark.parametrize(
    ("free_s", "back_s", "share", "met"),
    [(0.9, 10.0, 0.9, 3), (1.1, 10.0, 0.9, 2), (None, 15.0, 0.8, 0), (0.5, None, 0.95, 2)],
)
def test_bars_use_slowest_worker(
    free_s: float | None, back_s: float | None, share: float, met: int
) -> None:
    alone = {"free_s": {"prefill-0": 0.2, "decode-0": free_s}}
    judged = bars(alone, {"back_s": back_s, "share_later": share})
    assert sum(bar.met for bar in judged) == met

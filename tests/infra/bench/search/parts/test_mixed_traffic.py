"""The bars of mixed traffic."""

from typing import Any

from infra.bench.search.parts.mixed_traffic import _bars
from infra.bench.search.systems import OURS


def server(capacity_per_s: float, p99s: dict[str, float], misses: int = 0) -> dict[str, Any]:
    loads = {
        share: {
            "asked_per_s": float(share) * 1_000, "decode_ms_p99": p99, "prefill_misses": misses,
            "prefill_searches": 50,
        }
        for share, p99 in p99s.items()
    }  # fmt: skip
    return {"capacity_per_s": capacity_per_s, "loads": loads}


def test_bars_compare_tails_at_equal_load_and_capacity() -> None:
    ours = server(1_000, {"0.4": 1.0, "0.6": 2.9, "0.8": 4.0, "1.0": 90.0})
    static = server(1_010, {"0.4": 3.0, "0.6": 5.0, "0.8": 8.0, "1.0": 90.0}, misses=3)
    p99, tail, missed, capacity = _bars({"servers": {OURS: ours, "static batches": static}})
    assert (p99.value, p99.met) == (2.9, True)
    assert (tail.value, tail.met) == (2.0, True) and "at 80%" in tail.name
    assert (missed.value, missed.met) == (0, True)
    assert capacity.target == ">= 1" and not capacity.met
    assert ours["kept_up_to_per_s"] == 600 and static["kept_up_to_per_s"] == 0


def test_bars_use_highest_common_load() -> None:
    ours = server(1_000, {"0.4": 1.0, "0.6": 3.5, "0.8": 4.0})
    static = server(400, {"0.4": 3.0})
    p99, tail, _missed, _capacity = _bars({"servers": {OURS: ours, "static batches": static}})
    assert not p99.met and tail.value == 3.0 and "at 40%" in tail.name

"""The benchmark's cases of KV that must not be used, without an engine."""

from infra.bench.vllm.wrong_kv import CASES, CHECKED, CONTROL, bars

NOTHING = {"answers": 4, "wrong": 0, "wrong_from_cache": 0, "failed": 0, "read_bytes": 0}


def test_bars_judge_only_checked_answers() -> None:
    bad = {**NOTHING, "wrong": 4}
    assert all(bar.met for bar in bars({name: {CHECKED: NOTHING, CONTROL: bad} for name in CASES}))
    for worse in (bad, {**NOTHING, "wrong_from_cache": 1}):
        (bar,) = bars({"unknown request": {CHECKED: worse, CONTROL: NOTHING}})
        assert not bar.met

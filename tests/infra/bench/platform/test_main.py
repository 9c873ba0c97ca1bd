"""What the platform benchmark draws, and what its bars say of what was found."""

from collections import Counter
from itertools import islice
from typing import Any

from infra.bench.faults.kill_schedule import victims
from infra.bench.meters import growth
from infra.bench.platform import main as figures
from infra.bench.platform.main import PLAN
from infra.bench.platform.questions import FORM_EVERY, draw_questions
from infra.bench.results import Bar
from schemas.codec import Codec

NONE = {"count": 0, "some": []}
USAGE: dict[str, Any] = {
    "difference_tokens": 0, "requests_without_record": NONE, "records_without_request": NONE,
    "double": NONE, "gaps": 0,
}  # fmt: skip


def pair(**changes: Any) -> dict[str, Any]:
    names = ("missing", "double", "of_no_prompt", "under_another_key", "sent_but_not_there")
    forms = {"wanted": 10, "invalid": NONE}
    counts: dict[str, Any] = {"prompts": 40, "answers": 40, "errors": {}, "lag": 0, "forms": forms}
    return {**dict.fromkeys(names, NONE), "out_of_order": NONE, **counts, **changes}


def step(rate_per_s: float = 100.0) -> dict[str, Any]:
    ttft_ms = {"p50": 20.0, "p99": 30.0}
    counts = {"seconds": 10.0, "answers": 1_000, "rate_per_s": rate_per_s, "killed": {"broker": 2}}
    return {**counts, "ttft_ms": ttft_ms, "bridge_mib_max": 102.0, "bridge_memory_growth": 1.02}


def run_figures(rate_per_s: float = 100.0, **changes: Any) -> dict[str, Any]:
    steps = {name: step() for name in ("idle", "idle_hurt", "calm", "http")}
    lines = pair(out_of_order=None)
    return {
        "answers": {**steps, "log": step(rate_per_s)},
        "batch": step(),
        "checker": {
            "pairs": {"prompts": pair(**changes), "batch.prompts": lines},
            "usage": USAGE,
            "batches": [{"missing": NONE, "double": NONE, "errors": 0}],
        },
    }


def missed(bars: list[Bar]) -> list[str]:
    return [bar.name for bar in bars if not bar.met]


def test_bars_hold_without_findings() -> None:
    assert missed(figures.bars(run_figures())) == []
    assert len(figures.tables(run_figures())) == 2


def test_bars_fail_for_each_finding() -> None:
    finding = {"count": 1, "some": ["(0, 1)"]}
    assert missed(figures.bars(run_figures(missing=finding))) == ["prompts: without an answer"]
    assert missed(figures.bars(run_figures(errors={"shed": 1}))) == [
        "prompts: answered with an error"
    ]
    assert missed(figures.bars(run_figures(83.0))) == ["prompts: rate beside HTTP, kills"]
    forms = {"wanted": 100, "invalid": finding}
    assert missed(figures.bars(run_figures(forms=forms))) == [
        "simulated engines: answers that keep to their schema"
    ]


def test_bars_omit_parts_that_did_not_run() -> None:
    assert figures.bars({}) == []
    vllm = {"vllm": {**step(), "checker": {"pairs": {"prompts": pair()}}}}
    assert [bar.met for bar in figures.bars(vllm)] == [True, True]


def test_victims_take_turns_by_process_kind() -> None:
    victim_names = list(islice(victims(PLAN, 1), 4_000))
    assert (
        victim_names
        == list(islice(victims(PLAN, 1), 4_000))
        != list(islice(victims(PLAN, 2), 4_000))
    )
    counts = Counter(name.partition("-")[0] for name in victim_names)
    assert counts["bridge"] == counts["router"] == counts["gateway"] == 1_000
    assert counts["prefill"] + counts["decode"] + counts["replica"] == 1_000
    assert set(victim_names) == set(PLAN.names())


def test_questions_repeat_by_seed() -> None:
    some = list(draw_questions(400, 1))
    assert some == list(draw_questions(400, 1)) != list(draw_questions(400, 2))
    assert sum(question.has_form for question in some) == 400 / FORM_EVERY
    forms = Counter((q.has_form, q.prompt(Codec())[:1] == b"{") for q in some)
    assert forms == {(True, True): 50, (True, False): 50, (False, True): 150, (False, False): 150}
    assert len({question.line("sim")["custom_id"] for question in some}) == 400


def test_growth_reports_rising_memory() -> None:
    assert growth([100.0] * 30) == 1
    assert growth([100.0] * 10 + [110.0] * 10 + [150.0] * 10) == 1.5
    assert growth([100.0]) is None

"""The evaluation's arithmetic on made-up points, and the whole of it on a tiny grid."""

import json
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from infra.planning.grid import (
    CONFIGS,
    LOADS_PER_S,
    RATIOS,
    SHARES,
    WORKLOADS,
    Config,
    static,
)
from infra.planning.point import Point
from infra.planning.runs import Points
from infra.research import evaluation
from infra.research.paper import conversations, paper_tables, ppd_paper
from infra.research.report import bars, whole_page
from infra.research.studies import (
    chats,
    failures,
    interference,
    many_turns,
    pareto,
    regret,
    step_change,
    weights,
)
from infra.research.studies.served import ServedRow
from infra.simulator.cluster import READY_MS
from infra.simulator.machine.latency import Setup
from tests.infra.planning.points import every, point

POOLS = "2P2D"
LEARNED = Config(pools=POOLS, policy="learned")
SHORT = [w for w in WORKLOADS if not w.name.startswith(ppd_paper.LONG_CONTEXT)]


def served(config: str, load: float, latency: float, failed: int = 0) -> ServedRow:
    """100 requests of drawn conversations."""
    zeros = {field.name: 0 for field in fields(ServedRow)}
    figures = {"load_per_s": load, "requests": 100, "failed": failed, "latency": latency}
    figures["kv_bytes"] = int(latency)
    return ServedRow(**{**zeros, "about": "ShareGPT", "config": config, **figures})  # type: ignore[arg-type]  # by name


def test_table_1_takes_medians_and_explains_deviations() -> None:
    """Medians are over all workloads; those with long contexts stand beside them."""
    points = list[Point]()
    for pools in RATIOS:
        points += every(static(pools, "0", plain=True), decode_ttft=150.0, ttft=120.0)
        points += every(static(pools, "0"))
        points += every(static(pools, "1"), ttft=110.0)
        points += every(static(pools, "1", plain=True), decode_ttft=75.0)
    full = static(POOLS, "1", plain=True)
    points += [point(full, w.name, load, decode_ttft=50.0) for w in SHORT for load in LOADS_PER_S]
    points.append(point(full, WORKLOADS[9].name, 20.0, decode_ttft=1e6))
    cells = paper_tables.table_1(Points(points))
    assert {(cell.long, round(cell.trivium)) for cell in cells} == {(-50.0, 10)}
    assert [cell.mean > 0 for cell in cells].count(True) == 1
    off = [cell for cell in cells if not cell.is_close]
    assert {(c.pools, c.level) for c in off} == {
        ("1P3D", "medium"),
        ("1P3D", "high"),
        ("3P1D", "high"),
    }
    assert {cell.ours for cell in cells if cell.pools == POOLS} == {(-50.0 - 200 / 3) / 2}
    assert {cell.ours for cell in cells if cell.pools != POOLS} == {-50.0}
    assert all(bool(cell.why) != cell.is_close for cell in cells)
    assert "30 ms for the hand-over" in off[0].why


def test_trends_compare_published_directions() -> None:
    cells = [
        paper_tables.Table1Cell(
            pools=pools,
            level=level,
            paper=value,
            ours=value + 5,
            mean=0.0,
            long=0.0,
            trivium=0.0,
            why="",
        )
        for pools, row in ppd_paper.TABLE_1.items()
        for level, value in row.items()
    ]
    assert all(paper_tables.trends(cells).values())
    reversed_cells = [replace(cell, ours=-cell.ours) for cell in cells]
    assert not any(paper_tables.trends(reversed_cells).values())


def test_winner_tables_rank_failures_first() -> None:
    points = [p for config in CONFIGS for p in every(config)]
    points += every(CONFIGS[0], decode_ttft=1.0, failed=1)
    points += every(CONFIGS[2], decode_ttft=50.0, every_decode_tpot=20.0)
    rows_2 = {row.objective: row for row in paper_tables.table_2(Points(points))}
    assert rows_2["TTFT"].best["low"] == [(CONFIGS[2].name, 1.0)]
    assert rows_2["TPOT"].best["low"] == [(CONFIGS[1].name, 1.0)]
    assert rows_2["TTFT"].kinds == {**dict.fromkeys(paper_tables.KINDS, 0.0), CONFIGS[2].kind: 1.0}
    assert paper_tables.unlike_winners(Points(points)) == 1.0
    assert paper_tables.trends_2(list(rows_2.values()))["TPOT: x=0 wins most points"]
    rows = {row.config: row for row in paper_tables.table_4(Points(points), CONFIGS)}
    assert rows[CONFIGS[0].name].percent == {"low": 10.0, "medium": 10.0, "high": 10.0}
    assert rows[CONFIGS[0].name].degraded_loads == 10
    assert rows[CONFIGS[0].name].workloads == dict.fromkeys(LOADS_PER_S, 100.0)
    assert rows[CONFIGS[1].name].workloads == dict.fromkeys(LOADS_PER_S, 0.0)


def test_regrets_compare_with_best_share_of_each_point() -> None:
    points = [p for share in SHARES for p in every(static(POOLS, share))]
    points += every(static(POOLS, "1"), cost_ttft=50.0)  # cost (0.5 + 1) / 2
    points += every(LEARNED, cost_ttft=65.0)
    points += every(Config(pools=POOLS, policy="conditional"))
    worse = point(LEARNED, WORKLOADS[0].name, 1.0, cost_ttft=200.0, failed=2)
    points.append(worse)
    result = regret.regrets(Points(points), POOLS, LEARNED)
    assert result.points == 180
    assert result.mean_regret == pytest.approx((179 * 0.1 + 1.0) / 180)
    assert result.worst_at == f"{WORKLOADS[0].name} at 1/s"
    assert (result.missed, result.failed, result.failed_best) == (1, 2, 0)
    best = regret.regrets(Points(points), POOLS, static(POOLS, "1"))
    assert best.mean_regret == 0.0 and best.mean_cost == pytest.approx(0.75)


def test_interference_depends_on_measurement() -> None:
    """With as many tokens full and append cost about the same; few new tokens cost little. Only
    where a batch reads one context once does a full prompt cost much."""
    rows_by_prompts = {(row.prompts, row.kind): row for row in interference.slow_downs(Setup())}
    for count, published in ((1, ppd_paper.FIGURE_2), (4, ppd_paper.FIGURE_6)):
        full, append = rows_by_prompts[count, "full"], rows_by_prompts[count, "append"]
        short = rows_by_prompts[count, "short append"]
        assert append.steps == pytest.approx(full.steps, abs=2.0)
        assert short.steps < full.steps < append.steps
        assert append.answers < 10.0 and full.answers < append.answers
        assert full.answers < published["full"] < full.shared
        assert append.shared == pytest.approx(published["append"], abs=8.0)
    rows = interference.by_context(Setup(), (2_048, 32_768))
    near, far = ([row for row in rows if row.kind == kind] for kind in ("full", "append"))
    assert near[1].steps < near[0].steps and near[1].shared > near[0].shared
    assert far[1].answers < 25.0


def talks(ttft_ms: dict[tuple[int, int], float]) -> step_change.ChangedRun:
    """Two windows before the change and three after it, at 100 and 10 ms but for the TTFT of so
    many a window and turn, from 0."""
    window = step_change.WINDOW
    ttft = np.full((5 * window, 2), 100.0)
    for (number, turn), value in ttft_ms.items():
        ttft[number * window : (number + 1) * window, turn] = value
    each_ms = step_change.CHANGE_MS / (2 * window)
    return step_change.ChangedRun(
        began_ms=np.linspace(READY_MS, READY_MS + 4.99 * each_ms * window, 5 * window),
        ttft_ms=ttft,
        tpot_ms=np.full((5 * window, 2), 10.0),
        local=np.arange(5 * window) < 3 * window,
    )


def test_recovery_compares_windows_of_same_conversations() -> None:
    fixed = {static(POOLS, share): talks({}) for share in SHARES}
    fixed[static(POOLS, "1")] = talks({(1, 1): 80.0, (4, 0): 10.0})
    slow = {(0, 1): 900.0, (2, 1): 150.0}
    seeds = {
        7: {**fixed, LEARNED: talks({**slow, (3, 1): 128.0})},
        8: {**fixed, LEARNED: talks({**slow, (3, 1): 108.0, (4, 0): 100.0})},
    }
    later = step_change.recovery(POOLS, step_change.LATER, seeds)
    assert later.pooled.before == pytest.approx(1 / 0.9 - 1)
    assert later.pooled.after == [pytest.approx(0.25), pytest.approx(0.09), 0.0]
    after = {seed: windows.after for seed, windows in later.seeds.items()}
    assert after == {
        7: [pytest.approx(0.25), pytest.approx(0.14), 0.0],
        8: [pytest.approx(0.25), pytest.approx(0.04), 0.0],
    }
    assert later.holds and later.pooled.mean == pytest.approx(0.045)
    assert later.error == pytest.approx(0.025)
    assert (later.local_before, later.local_after) == (1.0, 0.0)
    every = step_change.recovery(POOLS, step_change.ALL, seeds)
    assert every.pooled.after[1:] == [pytest.approx(0.045), pytest.approx(1 / 0.775 - 1)]
    assert not every.holds
    [bar] = bars.recovery_claims([later, every])
    assert bar.holds and bar.value == pytest.approx(9.0)
    assert "over 2 seeds: 25.0%, 9.0%, 0.0%; with the first tokens of all turns: " in bar.finding
    assert bar.finding.endswith("4.5%, 29.0%")


def test_shared_conversations_match_published_statistics() -> None:
    for source, answered in (
        (conversations.SHAREGPT, conversations.ANSWERED_TOKENS),
        (conversations.WILDCHAT, 441.34),
    ):
        sampled_chats = conversations.conversations([source], 8.0, 500, 64, 1)
        turns = [turn for chat in sampled_chats for turn in chat.turns]
        assert len(turns) / len(sampled_chats) == pytest.approx(source.turns_mean, rel=0.05)
        assert min(len(chat.turns) for chat in sampled_chats) >= 1
        answers = [turn.output_tokens for turn in turns]
        assert sum(answers) / len(answers) == pytest.approx(answered, rel=0.1)
        last = max(chat.turns[-1].prompt_tokens for chat in sampled_chats)
        assert last <= conversations.CONTEXT_MAX


def test_prefill_heavy_conversations_ask_more_than_they_answer() -> None:
    """These are the conversations of figure 5."""
    for conversation in conversations.conversations(
        conversations.SYNTHETIC, 8.0, 40, 64, 1, prefill_heavy=True
    ):
        answered = sum(turn.output_tokens for turn in conversation.turns)
        assert len(conversation.tokens) - answered > answered


def test_failure_trends_explain_table_4() -> None:
    row = paper_tables.Failures(
        config="2P2D x=0 plain",
        percent={"low": 0.0},
        workloads={},
        memory_share=0.3,
        buffered_bytes=int(8e9),
        crashed_points=0,
        longest_ms=20_000.0,
        degraded_loads=0,
        slow_loads=0,
        loads=1,
    )
    rows = [
        row,
        replace(row, config="2P2D x=1 plain"),
        replace(row, config="3P1D x=0 plain", percent={"low": 5.0}),
    ]
    assert [words for words, holds in failures.trends(rows).items() if not holds] == [
        "plain 2P2D loses requests",
        "x=1 loses requests too",
    ]
    why = failures.causes(rows, [], [])
    assert (why.x1_bytes, why.x0_2p2d_bytes, why.lossless_2p2d) == (8e9, 8e9, True)
    lossy = [replace(row, percent={"low": 1.0}), *rows[1:]]
    assert not failures.causes(lossy, [], []).lossless_2p2d
    length = replace(served(row.config, 4.0, 1_000.0, failed=30), turns=16)
    why = failures.causes(rows, [], [length, replace(length, failed=0)])
    assert why.lossless_2p2d, "on the grid, which is the table's own set-up"
    assert (why.long_losses, why.long_losses_x1) == (["30 of 100 at 16 turns"], 0)
    rows[1] = replace(rows[1], percent={"low": 1.0})
    assert failures.trends(rows)["x=1 loses requests too"]


@pytest.mark.slow
def test_tiny_evaluation_writes_page_and_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bars are written like those of all benchmarks."""
    tiny = evaluation.GridSize(
        workloads=WORKLOADS[15:16],
        loads_per_s=(0.5, 2.0),
        part=WORKLOADS[15:16],
        part_loads_per_s=(0.5, 2.0),
        turns=(2,),
        step_seeds=2,
    )
    monkeypatch.setattr(chats, "QUICK_CONVERSATIONS", 10)
    monkeypatch.setattr(chats, "QUICK_LOADS_PER_S", (2.0,))
    monkeypatch.setattr(weights, "QUICK_CONVERSATIONS", 10)
    monkeypatch.setattr(pareto, "FIGURE_1_LOADS_PER_S", (0.5,))
    monkeypatch.setattr(pareto, "PURE", pareto.PURE[:3])
    monkeypatch.setattr(pareto, "DYNAMIC", pareto.DYNAMIC[:1])
    monkeypatch.setattr(many_turns, "DURATION_MS", 3_000.0)
    monkeypatch.setattr(evaluation, "QUICK", tiny)
    monkeypatch.setattr(step_change, "CHANGE_MS", 3_000.0)
    monkeypatch.setattr(step_change, "DURATION_MS", 8_000.0)
    monkeypatch.setattr(step_change, "WINDOW", 10)
    results = evaluation.evaluate(quick=True, seed=2, jobs=1, traces=None)
    assert [cell.level for cell in results.table_1] == ["low"] * 3
    assert all(row.points == (1 if "table" in row.config else 2) for row in results.regret)
    assert results.traffic_skipped and not results.traffic
    policies = [("1P3D x=0 plain", -1.0)]
    policies += product(["1P3D table plain", "1P3D learned"], [1.0, 3.0, 6.0])
    weighed_points = {
        (row.served.config, row.w_tpot, row.served.load_per_s) for row in results.weighed
    }
    assert weighed_points == {(*policy, load) for policy in policies for load in (8.0, 16.0)}
    assert {row.about for row in results.models} == set(many_turns.MEMORY_SHARES)
    assert {row.among for row in results.places if row.figure == "8"} == {"prefill-heavy, 2/s"}
    assert {row.all_orders for row in results.orders} == {True, False}
    page = whole_page.write(results, tmp_path)
    assert all(name in page.read_text() for name in ("Table 1", "Figure 7", "Figure 9b"))
    bars_file = bars.write(results, tmp_path / "bench")
    assert bars_file.name == "evaluate.json"
    written = json.loads(bars_file.read_text())
    assert [bar["met"] for bar in written["bars"]] == [bar.holds for bar in results.bars]
    assert {bar["name"] for bar in written["bars"]} == set(written["figures"]["found"])
    assert all(bar["target"] and bar["value"] is not None for bar in written["bars"])
    assert json.loads((tmp_path / "results.json").read_text())["seed"] == 2
    assert {path.suffix for path in tmp_path.iterdir() if path.is_file()} == {
        ".html",
        ".json",
        ".png",
    }

"""Studies that compare configurations, on made-up points; and what orders a run has."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from infra.planning.grid import RATIOS, SHARES, Config, static
from infra.planning.point import Point
from infra.planning.runs import Points
from infra.research.paper import conversations
from infra.research.studies import chats, orders, pareto, thresholds
from schemas.errors import ConfigError
from tests.infra.planning.points import LOADS, on_part
from tests.infra.research.test_evaluation import served


def test_compare_orders_uses_same_points() -> None:
    points = list[Point]()
    all_orders_points = list[Point]()
    for pools in RATIOS:
        learned = Config(pools=pools, policy="learned")
        for share in SHARES:
            points += on_part(static(pools, share))
            all_orders_points += on_part(replace(static(pools, share), all_orders=True), ttft=50.0)
        points += on_part(static(pools, "1"), cost_ttft=50.0, ttft=50.0)
        points += on_part(learned, cost_ttft=60.0)
        all_orders_points += on_part(replace(learned, all_orders=True))
    rows = orders.compare_orders(Points(points), Points(all_orders_points))
    assert [(row.pools, row.all_orders) for row in rows] == list(product(RATIOS, (False, True)))
    plain, every = rows[:2]
    assert plain.change == {"low": -50.0, "medium": -50.0} and plain.best_x == "1"
    assert plain.best == pytest.approx(0.75) and plain.learned == pytest.approx(0.8)
    assert plain.regret == pytest.approx(0.8 / 0.75 - 1)
    assert every.change == {"low": 0.0, "medium": 0.0} and every.regret == 0.0
    assert every.ttft_x0 == dict.fromkeys(LOADS, 50.0)


def test_tune_thresholds_chooses_pair_overall_and_per_load() -> None:
    points = list[Point]()
    candidates = list[Point]()
    for pools in RATIOS:
        for share in SHARES:
            points += on_part(static(pools, share))
        for policy in ("conditional", "learned"):
            points += on_part(Config(pools=pools, policy=policy), cost_ttft=120.0)
        for number, pair in enumerate(thresholds.CANDIDATES):
            config = Config(pools=pools, policy="conditional", thresholds=pair)
            for candidate in on_part(config, cost_ttft=110.0 + number):
                is_best = number == 1 and candidate.load_per_s == LOADS[1]
                candidates.append(replace(candidate, cost_ttft=100.0) if is_best else candidate)
    first, second = (f"{tokens}/{queue:g}" for tokens, queue in thresholds.CANDIDATES[:2])
    for row in thresholds.tune_thresholds(Points(points), Points(candidates)):
        assert row.default == row.learned == pytest.approx(0.1)
        assert row.pair == second and row.one_pair == pytest.approx(0.055 / 2)
        assert row.pairs == {LOADS[0]: first, LOADS[1]: second}
        assert row.per_load == pytest.approx(0.05 / 2)


def test_pareto_front_contains_undominated_lossless_configs() -> None:
    points = list[Point]()
    for config in pareto.PURE:
        points += on_part(config, decode_ttft_p99=100.0, tokens_per_s=8.0)
    for share, figures in (
        ("0", {"decode_ttft_p99": 10.0, "tokens_per_s": 50.0}),
        ("1", {"decode_ttft_p99": 20.0, "tokens_per_s": 60.0}),
        ("1/2", {"decode_ttft_p99": 30.0, "tokens_per_s": 55.0}),
    ):
        points += on_part(static("2P2D", share, plain=True), **figures)
    points += on_part(static("1P3D", "1", plain=True), decode_ttft_p99=1.0, failed=1)
    dynamic = [
        p
        for config in pareto.DYNAMIC
        for p in on_part(config, decode_ttft_p99=5.0, tokens_per_s=9.0)
    ]
    rows = pareto.figure_8(Points(points), Points(dynamic))
    assert {row.among for row in rows} == {f"decode-heavy, {load:g}/s" for load in LOADS}
    front = {row.config for row in rows if row.at_front}
    tables = {f"{pools} table plain" for pools in RATIOS}
    assert front == {"2P2D x=0 plain", "2P2D x=1 plain", *tables}


def test_changes_compare_latency_where_plain_x0_loses_nothing() -> None:
    rows = [
        *(
            served("2P2D x=0 plain", load, 100.0, failed)
            for load, failed in ((1, 0), (2, 0), (4, 9))
        ),
        *(
            served("2P2D table plain", load, latency)
            for load, latency in ((1, 80), (2, 90), (4, 1))
        ),
    ]
    [change] = chats.changes(rows)
    assert change.config == "2P2D table plain"
    assert change.latency == pytest.approx((-20.0, -10.0))
    assert (change.degraded, change.degraded_x0, change.loads) == (0, 1, 3)
    assert change.kv_bytes == pytest.approx(-15.0)


def test_conversations_read_both_data_set_formats(tmp_path: Path) -> None:
    """Files are arrays or lines; chats with an empty or overlong message are skipped."""
    shared = [{"from": who, "value": "x" * 4 * n} for who, n in (("human", 50), ("gpt", 70)) * 2]
    wild = [{"role": who, "content": "x" * 4 * n} for who, n in (("user", 9), ("assistant", 2)) * 3]
    long = [{"from": "human", "value": "x" * 9_000}, *shared[1:]]
    rows = [
        {"conversations": messages}
        for messages in (shared, shared[:2], long, [*shared[:3], {}], wild)
    ]
    array, lines = tmp_path / "a.json", tmp_path / "b.jsonl"
    array.write_text(json.dumps([*rows, "no conversation", {"conversations": 1}]))
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    source = conversations.read(array, 1)
    assert (
        source.recorded_chats
        == (((50, 70),) * 2, ((9, 4),) * 3)
        == conversations.read(lines, 1).recorded_chats
    )
    first, *_ = conversations.conversations([source], 2.0, 5, 64, 1)
    assert len(first.tokens) in (2 * 120, 3 * 13)
    lines.write_text("[]")
    with pytest.raises(ConfigError, match="of 2 turns and more in .*b.jsonl, as ShareGPT"):
        conversations.read(lines, 1)

"""The bars of the evaluation, like those of every benchmark.

`trivium evaluate` prints them and writes them to build/bench/evaluate.json.
"""

from dataclasses import asdict
from pathlib import Path

from infra.bench import results as bench_results
from infra.planning.grid import RATIOS
from infra.research.paper import ppd_paper
from infra.research.report.findings import Claim, EvaluationFindings
from infra.research.studies import regret, step_change
from infra.research.studies.served import ServedRow
from infra.research.studies.step_change import ALL, LATER, Recovery
from infra.research.studies.thresholds import ThresholdResult
from infra.research.studies.traffic import KV_SHARE_MAX, POOLS

_FIGURES = (  # fields of the findings that are written with the bars
    *("table_1", "table_2", "table_4", "headline", "first_turns", "interference", "contexts"),
    *("places", "chats", "chat_changes", "weighed", "lengths", "models", "varied"),
    *("regret", "orders", "tuned", "recovery", "frontier", "traffic"),
)


def make_claims(results: EvaluationFindings) -> list[Claim]:
    """Return every bar of the evaluation."""
    near, of = sum(cell.is_close for cell in results.table_1), len(results.table_1)
    finding = f"{near} of {of} cells, the others are explained below it"
    close = f"table 1 within {ppd_paper.TABLE_1_POINTS:g} points"
    claims = [
        _trends("table 1", results.trends),
        _trends("table 2", results.trends_2),
        _trends("table 4", results.trends_4),
        _claim(close, finding, near, f">= {of}", near == of, "cells"),
    ]
    for pools in RATIOS:
        claims += _policies(results, pools)
    claims += [_tuned_claim(row) for row in results.tuned]
    return [*claims, *recovery_claims(results.recovery), *_traffic(results.traffic)]


def _claim(
    what: str, finding: str, value: float, target: str, holds: bool, unit: str = ""
) -> Claim:
    return Claim(what=what, finding=finding, value=value, target=target, unit=unit, holds=holds)


def _trends(name: str, trends: dict[str, bool]) -> Claim:
    wrong = [words for words, is_met in trends.items() if not is_met]
    met_count = len(trends) - len(wrong)
    words = f"{met_count} of {len(trends)}"
    finding = f"{words}; not: {'; '.join(wrong)}" if wrong else words
    target = f">= {len(trends)}"
    return _claim(f"trends of {name}", finding, met_count, target, not wrong, "trends")


def _policies(results: EvaluationFindings, pools: str) -> list[Claim]:
    rows = {row.config: row for row in results.regret}
    learned, table = rows[f"{pools} learned"], rows[f"{pools} table"]
    fixed = min(row.mean_cost for row in results.regret if f"{pools} x=" in row.config)
    missed, bar = learned.missed + table.missed, regret.REGRET_MAX
    return [
        _claim(
            f"{pools} learned: mean regret at most {bar:.0%}",
            f"{learned.mean_regret:.1%}, worst {learned.worst_regret:.0%}",
            *(100 * learned.mean_regret, f"<= {100 * bar:g}", learned.mean_regret <= bar, "%"),
        ),
        _claim(
            f"{pools} learned: mean cost below that of every fixed x",
            f"{learned.mean_cost:.3f}, best x {fixed:.3f}",
            *(learned.mean_cost, f"< {fixed:.4g}", learned.mean_cost < fixed),
        ),
        _claim(
            f"{pools}: learned and table complete what some x completes",
            f"points with losses: learned {learned.missed}, table {table.missed}",
            *(missed, "<= 0", not missed, "points"),
        ),
    ]


def _tuned_claim(row: ThresholdResult) -> Claim:
    return _claim(
        f"{row.pools} learned: mean regret below that of Dynamo's rule with its best "
        "thresholds of each load",
        f"{row.learned:.1%}; {row.per_load:.1%}, with one pair for all loads "
        f"{row.one_pair:.1%} ({row.pair}), as shipped {row.default:.1%}",
        *(100 * row.learned, f"< {100 * row.per_load:.4g}", row.learned < row.per_load, "%"),
    )


def recovery_claims(rows: list[Recovery]) -> list[Claim]:
    """Return the claims on later turns, as in the grid's regret; they also show all turns."""
    every = {
        row.pools: f"before {row.pooled.before:.1%}, after it {row.pooled.after_text}"
        for row in rows
        if row.counted == ALL
    }
    bar = step_change.REGRET_MAX
    return [
        _claim(
            f"{row.pools} learned: within {bar:.0%} regret 200 requests after prefill slows down",
            f"before {row.pooled.before:.1%}; windows of 200 requests after it, pooled "
            f"over {len(row.seeds)} seeds: {row.pooled.after_text}; with the first "
            f"tokens of all turns: {every[row.pools]}",
            *(100 * max(row.pooled.after[1:], default=0.0), f"<= {100 * bar:g}", row.holds, "%"),
        )
        for row in rows
        if row.counted == LATER
    ]


def _traffic(rows: list[ServedRow]) -> list[Claim]:
    claims = []
    by = {(row.about, row.config): row for row in rows}
    for trace in sorted({row.about for row in rows if row.sent_later}):
        learned = by[trace, f"{POOLS} learned"]
        for config in (f"{POOLS} x=0 plain", f"{POOLS} x=0"):
            x0 = by[trace, config]
            share = learned.kv_bytes / x0.kv_bytes
            later = learned.later_kv_bytes / x0.later_kv_bytes
            faster = learned.ttft_p50 <= x0.ttft_p50 and learned.ttft_p99 <= x0.ttft_p99
            claims.append(
                _claim(
                    f"{trace}: KV bytes of learned at most {KV_SHARE_MAX} of {config}, TTFT "
                    "no worse",
                    f"{share:.2f} of all, {later:.2f} of later turns'; TTFT p50 "
                    f"{learned.ttft_p50:.0f} and {x0.ttft_p50:.0f} ms, p99 {learned.ttft_p99:.0f} "
                    f"and {x0.ttft_p99:.0f} ms",
                    share,
                    f"<= {KV_SHARE_MAX}, TTFT no worse",
                    share <= KV_SHARE_MAX and faster,
                )
            )
    return claims


def write(results: EvaluationFindings, folder: Path = bench_results.BENCH_DIR) -> Path:
    """Write build/bench/evaluate.json; returns its path."""
    return bench_results.write_report(
        "evaluate",
        command=bench_results.command_line(),
        seed=results.seed,
        load={"quick": results.quick, "runs": results.runs, "seconds": results.seconds},
        figures={
            **{name: [asdict(row) for row in getattr(results, name)] for name in _FIGURES},
            "unlike_winners": results.unlike_winners,
            "found": {bar.what: bar.finding for bar in results.bars},
        },
        bars=[
            bench_results.Bar(
                name=bar.what, value=bar.value, unit=bar.unit, target=bar.target, met=bar.holds
            )
            for bar in results.bars
        ],
        folder=folder,
    )

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
from infra.research.studies.step_change import ALL, LATER, Recovery, format_regrets
from infra.research.studies.thresholds import ThresholdResult
from infra.research.studies.traffic import KV_SHARE_MAX, POOLS, TraceResult

_FIGURES = (  # fields of the findings that are written with the bars
    *("table_1", "table_2", "table_4", "headline", "first_turns", "interference", "contexts"),
    *("places", "chats", "chat_changes", "weighed", "lengths", "models", "varied"),
    *("regret", "orders", "tuned", "recovery", "frontier", "traffic"),
)


def make_claims(results: EvaluationFindings) -> list[Claim]:
    """Return every bar of the evaluation."""
    near = sum(cell.is_close for cell in results.table_1)
    claims = [
        _trends("table 1", results.trends),
        _trends("table 2", results.trends_2),
        _trends("table 4", results.trends_4),
        Claim(
            what=f"table 1 within {ppd_paper.TABLE_1_POINTS:g} points",
            finding=f"{near} of {len(results.table_1)} cells, the others are explained below it",
            value=near,
            target=f">= {len(results.table_1)}",
            unit="cells",
            holds=near == len(results.table_1),
        ),
    ]
    for pools in RATIOS:
        claims += _policies(results, pools)
    claims += [_tuned_claim(row) for row in results.tuned]
    return [*claims, *recovery_claims(results.recovery), *_traffic(results.traffic)]


def _trends(name: str, trends: dict[str, bool]) -> Claim:
    wrong = [words for words, is_met in trends.items() if not is_met]
    met_count = len(trends) - len(wrong)
    words = f"{met_count} of {len(trends)}"
    return Claim(
        what=f"trends of {name}",
        finding=f"{words}; not: {'; '.join(wrong)}" if wrong else words,
        value=met_count,
        target=f">= {len(trends)}",
        unit="trends",
        holds=not wrong,
    )


def _policies(results: EvaluationFindings, pools: str) -> list[Claim]:
    rows = {row.config: row for row in results.regret}
    learned, table = rows[f"{pools} learned"], rows[f"{pools} table"]
    fixed = min(row.mean_cost for row in results.regret if f"{pools} x=" in row.config)
    return [
        Claim(
            what=f"{pools} learned: mean regret at most {regret.REGRET_MAX:.0%}",
            finding=f"{learned.mean_regret:.1%}, worst {learned.worst_regret:.0%}",
            value=100 * learned.mean_regret,
            target=f"<= {100 * regret.REGRET_MAX:g}",
            unit="%",
            holds=learned.mean_regret <= regret.REGRET_MAX,
        ),
        Claim(
            what=f"{pools} learned: mean cost below that of every fixed x",
            finding=f"{learned.mean_cost:.3f}, best x {fixed:.3f}",
            value=learned.mean_cost,
            target=f"< {fixed:.4g}",
            holds=learned.mean_cost < fixed,
        ),
        Claim(
            what=f"{pools}: learned and table complete what some x completes",
            finding=f"points with losses: learned {learned.missed}, table {table.missed}",
            value=learned.missed + table.missed,
            target="<= 0",
            unit="points",
            holds=not learned.missed and not table.missed,
        ),
    ]


def _tuned_claim(row: ThresholdResult) -> Claim:
    return Claim(
        what=f"{row.pools} learned: mean regret below that of Dynamo's rule with its best "
        "thresholds of each load",
        finding=f"{row.learned:.1%}; {row.per_load:.1%}, with one pair for all loads "
        f"{row.one_pair:.1%} ({row.pair}), as shipped {row.default:.1%}",
        value=100 * row.learned,
        target=f"< {100 * row.per_load:.4g}",
        unit="%",
        holds=row.learned < row.per_load,
    )


def recovery_claims(rows: list[Recovery]) -> list[Claim]:
    """Return the claims on later turns, as in the grid's regret; they also show all turns."""
    every = {
        row.pools: f"before {row.pooled.before:.1%}, after it {format_regrets(row.pooled.after)}"
        for row in rows
        if row.counted == ALL
    }
    return [
        Claim(
            what=f"{row.pools} learned: within {step_change.REGRET_MAX:.0%} regret 200 "
            "requests after prefill slows down",
            finding=f"before {row.pooled.before:.1%}; windows of 200 requests after it, pooled "
            f"over {len(row.seeds)} seeds: {format_regrets(row.pooled.after)}; with the first "
            f"tokens of all turns: {every[row.pools]}",
            value=100 * max(row.pooled.after[1:], default=0.0),
            target=f"<= {100 * step_change.REGRET_MAX:g}",
            unit="%",
            holds=row.holds,
        )
        for row in rows
        if row.counted == LATER
    ]


def _traffic(rows: list[TraceResult]) -> list[Claim]:
    claims = []
    by = {(row.trace, row.config): row for row in rows}
    for trace in sorted({row.trace for row in rows if row.later}):
        learned = by[trace, f"{POOLS} learned"]
        for config in (f"{POOLS} x=0 plain", f"{POOLS} x=0"):
            x0 = by[trace, config]
            share = learned.kv_bytes / x0.kv_bytes
            later = learned.later_kv_bytes / x0.later_kv_bytes
            faster = learned.ttft_p50 <= x0.ttft_p50 and learned.ttft_p99 <= x0.ttft_p99
            claims.append(
                Claim(
                    what=f"{trace}: KV bytes of learned at most {KV_SHARE_MAX} of {config}, TTFT "
                    "no worse",
                    finding=f"{share:.2f} of all, {later:.2f} of later turns'; TTFT p50 "
                    f"{learned.ttft_p50:.0f} and {x0.ttft_p50:.0f} ms, p99 {learned.ttft_p99:.0f} "
                    f"and {x0.ttft_p99:.0f} ms",
                    value=share,
                    target=f"<= {KV_SHARE_MAX}, TTFT no worse",
                    holds=share <= KV_SHARE_MAX and faster,
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

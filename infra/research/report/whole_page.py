"""Writes results as JSON, PNG files and one HTML page with everything embedded."""

import json
from collections.abc import Callable
from dataclasses import asdict
from html import escape
from pathlib import Path
from types import ModuleType

from infra.planning import authors_serving
from infra.planning.point import ORDERS
from infra.research.paper import ppd_paper
from infra.research.paper.paper_tables import KINDS, Failures
from infra.research.report import figures, plots
from infra.research.report.findings import EvaluationFindings
from infra.research.report.html import listing, note, page, picture, table
from infra.research.studies import orders, regret, step_change, thresholds
from infra.research.studies.step_change import format_regrets


def write(results: EvaluationFindings, folder: Path) -> Path:
    """Write all files into the folder and return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(to_json(results))
    pictures = plots.pictures(results)
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
    path = folder / "report.html"
    path.write_text(page("Placement, evaluated", _parts(results, pictures)))
    return path


def to_json(results: EvaluationFindings, *, points: bool = True) -> str:
    """Return the results as JSON, with or without the points."""
    tree = asdict(results)
    if not points:
        del tree["points"]
    return json.dumps(tree, indent=1)


def _parts(results: EvaluationFindings, pictures: dict[str, bytes]) -> list[str]:
    def image(name: str) -> str:
        return picture(name, pictures[name])

    return [
        _about(results),
        "<h2>Bars</h2>",
        table(("what", "found", "holds"), [(b.what, b.finding, b.holds) for b in results.bars]),
        "<h2>Table 1: turn-2 TTFT from x=0 to x=1, %</h2>",
        _table_1(results),
        image("table-1"),
        table(("trend", "here"), list(results.trends.items())),
        "<h2>Headline: from plain x=0 to x=1, %</h2>",
        _headline(results),
        "<h2>Table 2: who wins points</h2>",
        _table_2(results),
        "<h2>Table 4: failed requests, %</h2>",
        _table_4(results),
        image("table-4"),
        "<h2>Turn-1 TTFT</h2>",
        figures.first_turns(results),
        "<h2>Figure 1: TTFT against tokens/s, long conversations</h2>",
        figures.places(results, "1"),
        "<h2>Figures 2 and 6: one prompt and four beside a batch</h2>",
        figures.slow_downs(results),
        image("figures-2-6-7"),
        "<h2>Figure 4: conversations like ShareGPT's and WildChat's</h2>",
        figures.served_chats(results),
        image("figure-4"),
        "<h2>Figure 5: weights</h2>",
        figures.weight_table(results),
        "<h2>Figure 7: a prompt beside a batch with longer contexts</h2>",
        figures.contexts(results),
        "<h2>Figure 8: TTFT against tokens/s, on the grid</h2>",
        figures.places(results, "8"),
        image("figure-8"),
        "<h2>Figure 9a: 2 to 16 turns</h2>",
        figures.turns(results),
        image("turns"),
        "<h2>Figure 9b: larger models</h2>",
        figures.models(results),
        "<h2>Table 1 without what was chosen to fit</h2>",
        figures.sensitivity_table(results),
        "<h2>Regret</h2>",
        _regret(results),
        image("cost-by-load"),
        "<h2>In all three orders</h2>",
        _orders(results),
        "<h2>Dynamo's rule with other thresholds</h2>",
        _tuned(results),
        "<h2>Step change: prefill workers become twice as slow</h2>",
        _recovery(results),
        "<h2>Weights against frontier, on the grid</h2>",
        _frontier(results),
        image("frontier"),
        "<h2>Real traffic</h2>",
        _traffic(results),
    ]


def _about(results: EvaluationFindings) -> str:
    setup = results.setup
    size = "a part of the grid (--quick)" if results.quick else "the whole grid"
    return (
        f"<p>{size}: {results.runs} simulations of {results.duration_ms / 1e3:.0f} s of arrivals, "
        f"seed {results.seed}, {results.seconds:.0f} s. Four {escape(setup.gpu.name)}, "
        f"{escape(setup.model.name)}, {setup.link.bytes_per_s * 8 / 1e9:.0f} Gbit/s links, "
        f"{setup.bus_ms:g} ms per hop over the log, requests time out after "
        f"{results.timeout_ms / 1e3:.0f} s. Lengths, loads, configurations and clients are those "
        "that the authors publish. The router is the real one, and remote turns run in vLLM's "
        f"default order ({escape(', '.join(ORDERS))}). Engines are a roofline model. Two of its "
        "constants were chosen with figures below in view: steps of "
        f"{setup.mixed_chunk_tokens} tokens beside a batch, and the connector's time. What comes "
        "out without them stands below.</p><p>Plain is disaggregation as the authors run it: "
        "conversations dealt to workers by hash; all KV at every turn, pushed by a connector "
        f"that holds the prefill worker for {authors_serving.CONNECTOR_MS:g} ms per prompt (what "
        "the model lacks of their measurement of one request at a time), into a buffer of "
        f"{authors_serving.RECEIVE_BUFFER_BYTES / 1e9:.0f} GB beside the engine's memory, held "
        "until the request ends; a decode worker whose buffer overflows dies. Clients send text "
        "back, so the KV of an answer is not found again. Not modelled: in the authors' grid two "
        "of nine second turns are dealt anew, as their proxy does not find the conversation's "
        "key in them. With x=1 these go through prefill again, which leaves "
        "seven ninths of the gains in table 1.</p>"
    )


def _table_1(results: EvaluationFindings) -> str:
    about = (
        "Here as behind the paper's proxy: all workloads, the client hears the decode worker only, "
        "and x=0 is plain. Cells are medians over points. The last column is what Trivium's "
        "clients see, from Trivium's own x=0, whose first token comes from the prefill worker at "
        "once."
    )
    rows_html = listing(
        results.table_1,
        {
            "": lambda c: c.pools,
            "load": lambda c: c.level,
            "paper": lambda c: f"{c.paper:.1f}",
            "here": lambda c: f"{c.ours:.1f}",
            "within 15 points": lambda c: c.is_close,
            "mean here": lambda c: f"{c.mean:.1f}",
            "long contexts only": lambda c: f"{c.long:.1f}",
            "at Trivium's clients": lambda c: f"{c.trivium:.1f}",
        },
    )
    why = [note(f"{c.pools}, {c.level}: {c.why}") for c in results.table_1 if c.why]
    return f"<p>{escape(about)}</p>{rows_html}{''.join(why)}"


def _headline(results: EvaluationFindings) -> str:
    low, high = ppd_paper.TPOT_PREFILL_HEAVY
    mean, best, worst = ppd_paper.TTFT_LATER
    published = (
        *(
            "paper",
            f"{mean:.0f} ({best:.0f} to {worst:.0f})",
            f"{ppd_paper.KV_VOLUME:.0f}",
            "",
        ),
        f"+{low:.0f} to +{high:.0f}",
    )
    rows = [
        (
            *(h.pools, f"{h.ttft:.1f}", f"{h.kv_volume:.1f}", f"{h.later_kv_volume:.1f}"),
            f"{h.tpot_prefill_heavy:+.1f}",
        )
        for h in results.headline
    ]
    heads = ("", "turn-2 TTFT", "KV volume", "of turn 2", "TPOT, prefill-heavy")
    return table(heads, [*rows, published])


def _table_2(results: EvaluationFindings) -> str:
    rows = []
    for row in results.table_2:
        published = ppd_paper.TABLE_2[row.objective]
        rows.append((f"{row.objective}, paper", *(f"{published.get(k, '')}" for k in KINDS)))
        rows.append((f"{row.objective}, here", *(f"{100 * row.kinds[k]:.1f}" for k in KINDS)))
    means = [
        sum(row.kinds[kind] for row in results.table_2) / len(results.table_2) for kind in KINDS
    ]
    rows.append(("average, paper", *(f"{ppd_paper.TABLE_2_AVERAGE.get(k, '')}" for k in KINDS)))
    rows.append(("average, here", *(f"{100 * mean:.1f}" for mean in means)))
    best = [
        (row.objective, level, ", ".join(f"{name} {share:.0%}" for name, share in names))
        for row in results.table_2
        for level, names in row.best.items()
    ]
    about = (
        "Percent of the points of workload and load at which a kind of configuration is best among "
        f"those that complete {ppd_paper.SUCCESS_MIN:.0%} of their requests. TTFT and TPOT have "
        "different winners at "
        f"{results.unlike_winners:.1%} of the points (paper: {ppd_paper.UNLIKE_WINNERS} %)."
    )
    trends = table(("trend", "here"), list(results.trends_2.items()))
    return (
        f"<p>{escape(about)}</p>{table(('', *KINDS), rows)}{trends}"
        f"{table(('best', 'load', 'configurations that win most'), best)}{note(results.why_2)}"
    )


def _table_4(results: EvaluationFindings) -> str:
    def percent(level: str) -> Callable[[Failures], str]:
        return lambda row: f"{row.percent[level]:.2f}"

    levels = list(next(iter(results.table_4)).percent)
    beside = _beside_table_4({row.config: row for row in results.table_4})
    grid = listing(
        results.table_4,
        {
            "": lambda r: r.config,
            **{level: percent(level) for level in levels},
            "loads with failures": lambda r: f"{r.degraded_loads} of {r.loads}",
            "TTFT p99 over 1 s": lambda r: f"{r.slow_loads} of {r.loads}",
            "longest, s": lambda r: f"{r.longest_ms / 1e3:.1f}",
            "memory in use": lambda r: f"{r.memory_share:.0%}",
            "buffer, GB": lambda r: f"{r.buffered_bytes / 1e9:.1f}",
            "points with dead workers": lambda r: r.crashed_points,
        },
    )
    trends = table(("trend", "here"), list(results.trends_4.items()))
    return f"{beside}{grid}{trends}{''.join(note(text) for text in results.why_4)}"


def _beside_table_4(failures: dict[str, Failures]) -> str:
    """Return the published cells and ours, both as percent of the workloads in which a request
    failed."""
    rows = []
    for name, published in ppd_paper.TABLE_4.items():
        percents = failures[name if name == "4R" else f"{name} plain"].workloads
        here = [f"{percents[load]:.0f}" if load in percents else "" for load in published]
        rows += [(f"{name}, paper", *published.values()), (f"{name}, here", *here)]
    loads = (f"{load:g}/s" for load in next(iter(ppd_paper.TABLE_4.values())))
    about = "Percent of the workloads in which a request failed, as table 4's cells are read."
    return f"<p>{about}</p>{table(('', *loads), rows)}"


def _explain(study: ModuleType) -> str:
    """Return a study's module docstring as HTML."""
    return f"<pre class=why>{escape((study.__doc__ or '').strip())}</pre>"


def _regret(results: EvaluationFindings) -> str:
    about = _explain(regret)
    return about + listing(
        results.regret,
        {
            "": lambda r: r.config,
            "points": lambda r: r.points,
            "mean J": lambda r: f"{r.mean_cost:.3f}",
            "mean regret": lambda r: f"{r.mean_regret:.1%}",
            "p90": lambda r: f"{r.p90_regret:.1%}",
            "worst": lambda r: f"{r.worst_regret:.0%}, {r.worst_at}",
            "failed (best x)": lambda r: f"{r.failed} ({r.failed_best})",
            "points lost": lambda r: r.missed,
            "local": lambda r: f"{r.local_share:.0%}",
        },
    )


def _orders(results: EvaluationFindings) -> str:
    about = _explain(orders)
    levels = list(results.orders[0].change)
    return about + listing(
        results.orders,
        {
            "": lambda r: r.pools,
            "orders": lambda r: "all three" if r.all_orders else ", ".join(ORDERS),
            "TTFT of x=0 by load, ms": lambda r: _by_load(r.ttft_x0),
            "of x=1": lambda r: _by_load(r.ttft_x1),
            f"x=0 to x=1 at {', '.join(levels)} load, %": lambda r: ", ".join(
                f"{r.change[level]:+.0f}" for level in levels
            ),
            "KV of x=0, GB": lambda r: f"{r.kv_bytes_x0 / 1e9:.0f}",
            "mean J of learned": lambda r: f"{r.learned:.3f}",
            "of the best x": lambda r: f"{r.best:.3f}, x={r.best_x}",
            "regret of learned": lambda r: f"{r.regret:.1%}",
        },
    )


def _by_load(times_ms: dict[float, float]) -> str:
    return ", ".join(f"{ttft_ms:.0f} at {load:g}/s" for load, ttft_ms in times_ms.items())


def _tuned(results: EvaluationFindings) -> str:
    about = _explain(thresholds)
    return about + listing(
        results.tuned,
        {
            "mean regret": lambda r: r.pools,
            "default thresholds": lambda r: f"{r.default:.1%}",
            "best pair (tokens/queue)": lambda r: f"{r.one_pair:.1%}, {r.pair}",
            "best pair of each load": lambda r: f"{r.per_load:.1%}",
            "which": lambda r: ", ".join(f"{pair} at {at:g}/s" for at, pair in r.pairs.items()),
            "learned": lambda r: f"{r.learned:.1%}",
        },
    )


def _recovery(results: EvaluationFindings) -> str:
    about = _explain(step_change)
    pooled = listing(
        results.recovery,
        {
            "": lambda r: f"{r.pools}, TTFT of {r.counted}",
            "regret before": lambda r: f"{r.pooled.before:.1%}",
            "windows of 200 requests after": lambda r: format_regrets(r.pooled.after),
            "mean but for the first": lambda r: f"{r.pooled.mean:.1%} ± {r.error:.1%}",
            "local before": lambda r: f"{r.local_before:.0%}",
            "after": lambda r: f"{r.local_after:.0%}",
        },
    )
    rows = [
        (
            f"{row.pools}, TTFT of {row.counted}",
            seed,
            f"{windows.before:.1%}",
            format_regrets(windows.after),
        )
        for row in results.recovery
        for seed, windows in row.seeds.items()
    ]
    heads = ("", "seed", "regret before", "windows of 200 requests after")
    return f"{about}{pooled}{table(heads, rows)}"


def _frontier(results: EvaluationFindings) -> str:
    return listing(
        results.frontier,
        {
            "": lambda m: m.name,
            "TTFT over x=0": lambda m: f"{m.ttft:.3f}",
            "TPOT over x=0": lambda m: f"{m.tpot:.3f}",
            "local": lambda m: f"{m.local_share:.0%}",
        },
    )


def _traffic(results: EvaluationFindings) -> str:
    if results.traffic_skipped:
        return f"<p>Skipped: {escape(results.traffic_skipped)}</p>"
    credit = note(
        "Traces: Azure Public Dataset, AzureLLMInferenceTrace_code 2023 (CC-BY 4.0); "
        "kvcache-ai/Mooncake, FAST25-release (Apache-2.0). Azure's requests name no sessions, so "
        "policies differ on them only by pools."
    )
    rows_html = listing(
        results.traffic,
        {
            "": lambda r: f"{r.trace}, {r.config}",
            "requests (later turns)": lambda r: f"{r.requests} ({r.later})",
            "TTFT p50": lambda r: f"{r.ttft_p50:.0f}",
            "p99": lambda r: f"{r.ttft_p99:.0f}",
            "p50 of later turns": lambda r: f"{r.later_ttft_p50:.0f}",
            "TPOT p99": lambda r: f"{r.tpot_p99:.1f}",
            "KV moved, GB": lambda r: f"{r.kv_bytes / 1e9:.0f}",
            "by later turns": lambda r: f"{r.later_kv_bytes / 1e9:.0f}",
            "failed": lambda r: r.failed,
        },
    )
    return rows_html + credit

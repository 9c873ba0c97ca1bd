"""Writes results as JSON, PNG files and one HTML page with everything embedded."""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from infra.evaluate import paper, plots, regret
from infra.evaluate.main import Results

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:.8rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .7rem;border-bottom:1px solid #dde3ea;text-align:right}
th:first-child,td:first-child{text-align:left}
img{max-width:100%}.yes{color:#1a7f37}.no{color:#b42318}.why{color:#55606e;font-size:90%}
"""


def write(results: Results, folder: Path) -> Path:
    """All files into the folder; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(to_json(results))
    pictures = plots.pictures(results)
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
    page = folder / "report.html"
    page.write_text(_page(results, pictures))
    return page


def to_json(results: Results, *, points: bool = True) -> str:
    """The whole tree, or all of it but the points."""
    tree = asdict(results)
    if not points:
        del tree["points"]
    return json.dumps(tree, indent=1)


def _page(results: Results, pictures: dict[str, bytes]) -> str:
    def picture(name: str) -> str:
        data = base64.b64encode(pictures[name]).decode()
        return f'<img alt="{name}" src="data:image/png;base64,{data}">'

    parts = [
        "<!doctype html><meta charset=utf-8><title>Placement, evaluated</title>",
        f"<style>{_STYLE}</style><h1>Placement, evaluated</h1>",
        _about(results),
        "<h2>Bars</h2>",
        _table(("what", "found", "holds"), [(b.what, b.found, b.holds) for b in results.bars]),
        "<h2>Table 1: turn-2 TTFT from x=0 to x=1, %</h2>",
        _table_1(results),
        picture("table-1"),
        _table(("trend", "here"), list(results.trends.items())),
        "<h2>Headline: from plain x=0 to x=1, %</h2>",
        _headline(results),
        "<h2>Table 2: who wins most points</h2>",
        _table_2(results),
        "<h2>Table 4: failed requests, %</h2>",
        _table_4(results),
        picture("table-4"),
        "<h2>Figure 2: interference</h2>",
        _interference(results),
        picture("figure-2"),
        "<h2>Regret</h2>",
        _regret(results),
        picture("cost-by-load"),
        "<h2>Step change: prefill workers become twice as slow</h2>",
        _recovery(results),
        "<h2>Figure 5: weights against frontier</h2>",
        _frontier(results),
        picture("figure-5"),
        "<h2>2 to 16 turns</h2>",
        _turns(results),
        picture("turns"),
        "<h2>Real traffic</h2>",
        _traffic(results),
    ]
    return "\n".join(parts)


def _about(results: Results) -> str:
    setup = results.setup
    size = "a part of the grid (--quick)" if results.quick else "the whole grid"
    return (
        f"<p>{size}: {results.runs} simulations of {results.duration_ms / 1e3:.0f} s of arrivals, "
        f"seed {results.seed}, {results.seconds:.0f} s. Four {escape(setup.gpu.name)}, "
        f"{escape(setup.model.name)}, {setup.link.bytes_per_s * 8 / 1e9:.0f} Gbit/s links, "
        f"{setup.bus_ms:g} ms per hop over the log, requests time out after "
        f"{results.timeout_ms / 1e3:.0f} s. The router is the real one; engines are a roofline "
        "model that is not fitted to any figure below.</p>"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return f"<td class={'yes' if value else 'no'}>{'yes' if value else 'no'}</td>"
    return f"<td>{escape(str(value))}</td>"


def _table_1(results: Results) -> str:
    rows = [
        (
            c.pools,
            c.level,
            f"{c.paper:.1f}",
            f"{c.ours:.1f}",
            c.within,
            f"{c.mean:.1f}",
            f"{c.trivium:.1f}",
        )
        for c in results.table_1
    ]
    why = "".join(
        f"<p class=why>{c.pools}, {c.level}: {escape(c.why)}</p>" for c in results.table_1 if c.why
    )
    heads = ("", "load", "paper", "here", "within 15 points", "mean here", "at Trivium's clients")
    note = (
        "<p>Here as behind the paper's proxy: the client hears the decode worker only, and plain "
        "disaggregation moves the whole KV. Cells are medians over points; means are those of the "
        "few points where decode workers are saturated. The last column is what Trivium's clients "
        "see, from Trivium's own x=0, whose first token comes from the prefill worker at once.</p>"
    )
    return note + _table(heads, rows) + why


def _headline(results: Results) -> str:
    rows = [
        (
            h.pools,
            f"{h.ttft:.1f}",
            f"{h.kv_volume:.1f}",
            f"{h.later_kv_volume:.1f}",
            f"{h.tpot_prefill_heavy:+.1f}",
        )
        for h in results.headline
    ]
    low, high = paper.TPOT_PREFILL_HEAVY
    mean, best, least = paper.TTFT_LATER
    rows.append(
        (
            "paper",
            f"{mean:.0f} ({best:.0f} to {least:.0f})",
            f"{paper.KV_VOLUME:.0f}",
            "",
            f"+{low:.0f} to +{high:.0f}",
        )
    )
    heads = ("", "turn-2 TTFT", "KV volume", "of turn 2", "TPOT, prefill-heavy")
    return _table(heads, rows)


def _table_2(results: Results) -> str:
    rows = [
        (objective, level, ", ".join(f"{name} {share:.0%}" for name, share in winners))
        for objective, levels in results.table_2.items()
        for level, winners in levels.items()
    ]
    note = (
        "<p>Share of workload-load points at which a configuration is best among those with the "
        "fewest failures. The paper's own winners are not at hand; its claim is that x=1 wins "
        "TTFT and plain disaggregation TPOT.</p>"
    )
    return note + _table(("smallest", "load", "winners"), rows)


def _table_4(results: Results) -> str:
    levels = list(next(iter(results.table_4)).percent)
    rows = [
        (
            row.config,
            *(f"{row.percent[level]:.2f}" for level in levels),
            f"{row.degraded_loads} of {row.loads}",
            f"{row.slow_loads} of {row.loads}",
        )
        for row in results.table_4
    ]
    degraded, of = paper.DEGRADED_2P2D
    note = (
        f"<p class=why>The paper: plain 2P2D degraded at {degraded} of {of} loads, x=1 completed "
        "everything. Its plain disaggregation failed for reasons of its implementation too; here "
        "only queues and timeouts fail requests.</p>"
    )
    return (
        _table(("", *levels, "loads with failures", "with turn-2 TTFT p99 over 1 s"), rows) + note
    )


def _interference(results: Results) -> str:
    rows = [
        (name, f"{paper.FIGURE_2[name]:.0f}", f"{found:.1f}")
        for name, found in results.interference.items()
    ]
    return _table(("beside a batch of 200", "paper, %", "here, %"), rows)


def _regret(results: Results) -> str:
    rows = [
        (
            r.config,
            r.points,
            f"{r.mean_cost:.3f}",
            f"{r.mean_regret:.1%}",
            f"{r.p90_regret:.1%}",
            f"{r.worst_regret:.0%}, {r.worst_at}",
            f"{r.failed} ({r.failed_best})",
            r.missed,
            f"{r.local_share:.0%}",
        )
        for r in results.regret
    ]
    heads = (
        *("", "points", "mean J", "mean regret", "p90", "worst", "failed (best x)"),
        *("points lost", "local"),
    )
    about = f"<pre class=why>{escape((regret.__doc__ or '').strip())}</pre>"
    return about + _table(heads, rows)


def _recovery(results: Results) -> str:
    rows = [
        (
            r.pools,
            f"{r.before:.1%}",
            ", ".join(f"{value:.1%}" for value in r.after),
            f"{r.local_before:.0%}",
            f"{r.local_after:.0%}",
        )
        for r in results.recovery
    ]
    heads = ("", "regret before", "windows of 200 requests after", "local before", "after")
    return _table(heads, rows)


def _frontier(results: Results) -> str:
    rows = [
        (m.name, f"{m.ttft:.3f}", f"{m.tpot:.3f}", f"{m.local_share:.0%}") for m in results.frontier
    ]
    return _table(("", "TTFT over x=0", "TPOT over x=0", "local"), rows)


def _turns(results: Results) -> str:
    rows = [
        (
            r.config,
            r.turns,
            f"{r.ttft:.0f}",
            f"{r.decode_ttft:.0f}",
            f"{r.tpot:.2f}",
            f"{r.kv_bytes / 1e9:.1f}",
            f"{r.failed} of {r.requests}",
        )
        for r in results.lengths
    ]
    heads = ("", "turns", "TTFT, ms", "decode's, ms", "TPOT, ms", "KV moved, GB", "failed")
    return _table(heads, rows)


def _traffic(results: Results) -> str:
    if results.traffic_skipped:
        return f"<p>Skipped: {escape(results.traffic_skipped)}</p>"
    rows = [
        (
            f"{r.trace}, {r.config}",
            f"{r.requests} ({r.later})",
            f"{r.ttft_p50:.0f}",
            f"{r.ttft_p99:.0f}",
            f"{r.later_ttft_p50:.0f}",
            f"{r.tpot_p99:.1f}",
            f"{r.kv_bytes / 1e9:.0f}",
            f"{r.later_kv_bytes / 1e9:.0f}",
            r.failed,
        )
        for r in results.traffic
    ]
    heads = (
        *("", "requests (later turns)", "TTFT p50", "p99", "p50 of later turns", "TPOT p99"),
        *("KV moved, GB", "by later turns", "failed"),
    )
    credit = (
        "<p class=why>Traces: Azure Public Dataset, AzureLLMInferenceTrace_code 2023 (CC-BY 4.0); "
        "kvcache-ai/Mooncake, FAST25-release (Apache-2.0). Azure's requests name no sessions, so "
        "policies differ on them only by pools.</p>"
    )
    return _table(heads, rows) + credit

"""The paper's figures as parts of the report's page, each with the published values."""

from collections.abc import Callable, Sequence
from html import escape

from infra.research.paper import ppd_paper
from infra.research.paper.conversations import SHAREGPT
from infra.research.report.findings import EvaluationFindings
from infra.research.report.html import listing, note, table
from infra.research.studies import interference, many_turns, pareto, sensitivity, weights
from infra.research.studies.chats import ChatResult
from infra.research.studies.interference import SlowDown
from infra.research.studies.many_turns import TurnCountResult
from infra.research.studies.pareto import ParetoPoint

SHARED = (
    "In that script all of a batch has one context. vLLM read what all running requests share only "
    "once (cascade attention, which version 0.32 no longer has); a full prompt does not share it, "
    "so beside one every request read its own. That makes a full prompt cost more than published, "
    "and an append as little, in the last column: the gap is one of reading contexts, which "
    "conversations of their own do not have in common."
)
_SLOW_DOWNS: dict[str, Callable[[SlowDown], str]] = {
    "here, steps beside the prompt, %": lambda r: f"{r.steps:+.1f}",
    "answers of 64 tokens, %": lambda r: f"{r.answers:+.1f}",
    "with a context that is read once, %": lambda r: f"{r.shared:+.0f}",
}


def places(results: EvaluationFindings, figure: str) -> str:
    """Render figure 1 or 8: the configurations at the front."""
    published = "Paper: configurations with all later turns local are on the frontier"
    where = (
        f"conversations of {pareto.TURNS} turns of {pareto.ASKED_TOKENS} tokens with "
        f"{pareto.ANSWERED_TOKENS} answered"
        if figure == "1"
        else "the grid's workloads"
    )
    rows = [row for row in results.places if row.figure == figure]
    about = (
        f"{published}; dynamic PPD picks the best. Here: {where}, behind the authors' proxy, TTFT "
        "of later turns at the 99th percentile. What loses a request is at no front."
    )
    rows_html = listing(
        [row for row in rows if row.at_front],
        {
            "at the front": lambda r: r.among,
            "configuration": lambda r: r.config,
            "TTFT p99, ms": lambda r: f"{r.ttft_p99:.0f}",
            "tokens/s": lambda r: f"{r.tokens_per_s:.0f}",
        },
    )
    return f"<p>{escape(about)} {escape(fronts(rows))}</p>{rows_html}"


def fronts(rows: Sequence[ParetoPoint]) -> str:
    """Return how often each kind of configuration is at a front, in words."""
    among = len({row.among for row in rows})
    counts = {
        "x=1": sum(row.at_front for row in rows if row.is_local),
        "dynamic PPD": sum(row.at_front for row in rows if " table" in row.config),
        "x=0": sum(row.at_front for row in rows if " x=0 " in row.config),
        "replicas": sum(row.at_front for row in rows if row.config == "4R"),
    }
    totals = {"x=1": 3, "dynamic PPD": 3, "x=0": 3, "replicas": 1}
    shares = (f"{name} {count} of {totals[name] * among}" for name, count in counts.items())
    return f"Places at the front: {', '.join(shares)}."


def slow_downs(results: EvaluationFindings) -> str:
    """Render figures 2 and 6: slow-downs beside one prompt and four."""
    published = {1: ppd_paper.FIGURE_2, 4: ppd_paper.FIGURE_6}
    about = (
        "The paper says that full and append process as many tokens. A roofline cannot tell these "
        "apart: 2 FLOP per parameter and new token either way. As the authors' script measures, "
        f"by the mean time per token of answers of {interference.ANSWER_TOKENS} tokens, most of "
        "which come when the prompt is done, an append costs what is published, and a full prompt "
        f"as little. {SHARED}"
    )
    rows = listing(
        results.interference,
        {
            "beside a batch of 200": lambda r: f"{r.prompts} {r.kind}",
            "paper, %": lambda r: (
                f"{published[r.prompts].get(r.kind, 0):+.0f}"
                if r.kind in published[r.prompts]
                else ""
            ),
            **_SLOW_DOWNS,
        },
    )
    new, short = ppd_paper.FIGURE_2_TOKENS, interference.SHORT_TOKENS
    kinds = f"Full and append have {new} new tokens, short appends {short}; appends lie behind "
    return (
        f"<p>{escape(about)}</p>{rows}{note(f'{kinds}{interference.CONTEXT_TOKENS} of context.')}"
    )


def contexts(results: EvaluationFindings) -> str:
    """Render figure 7: slow-downs by the batch's context length."""
    about = (
        "Paper: a full prompt makes the time per token 3 to 4 times as long at 32 768 tokens of "
        "context, an append less than 25 % longer at 65 536. An append costs as little in the "
        "model. A full prompt does, too, and the less the longer the contexts are that the batch "
        f"reads anyway. {SHARED}"
    )
    return f"<p>{escape(about)}</p>" + listing(
        results.contexts,
        {
            f"beside a batch of {ppd_paper.FIGURE_7_BATCH}": lambda r: r.kind,
            "context": lambda r: f"{r.context_tokens:,}",
            "paper, %": _figure_7,
            **_SLOW_DOWNS,
        },
    )


def _figure_7(row: SlowDown) -> str:
    if row.kind == "full" and row.context_tokens in ppd_paper.FIGURE_7_FULL:
        low, high = ppd_paper.FIGURE_7_FULL[row.context_tokens]
        return f"+{low:.0f} to +{high:.0f}"
    if row.kind == "append" and row.context_tokens in ppd_paper.FIGURE_7_APPEND_MAX:
        return f"below +{ppd_paper.FIGURE_7_APPEND_MAX[row.context_tokens]:.0f}"
    return ""


def served_chats(results: EvaluationFindings) -> str:
    """Render figure 4, with KV volume and degraded loads."""
    low, high = ppd_paper.QUERY_LATENCY
    about = (
        f"Paper: average query latency of PPD {low:g} to {high:g} % from x=0 (1P3D, ShareGPT), KV "
        f"volume {ppd_paper.KV_VOLUME:g} % at {ppd_paper.KV_TURNS:g} turns, PPD completes "
        f"everything, x=0 below {ppd_paper.SUCCESS_MIN:.0%} at "
        f"{ppd_paper.DEGRADED_2P2D[0]} of {ppd_paper.DEGRADED_2P2D[1]} loads (2P2D) and "
        f"{ppd_paper.DEGRADED_3P1D[0]} of {ppd_paper.DEGRADED_3P1D[1]} (3P1D). Here with weights "
        "1/1, at loads at which x=0 loses nothing; `table plain` is dynamic PPD, by the authors' "
        "algorithm behind their proxy."
    )
    return (
        f"<p>{escape(about)}</p>"
        + listing(
            results.chat_changes,
            {
                "beside plain x=0": lambda r: f"{r.source}, {r.config}",
                "average query latency, %": lambda r: f"{r.latency[0]:+.1f} to {r.latency[1]:+.1f}",
                "KV volume, %": lambda r: f"{r.kv_bytes:+.0f}",
                "degraded loads": lambda r: f"{r.degraded} of {r.loads}",
                "of x=0": lambda r: f"{r.degraded_x0} of {r.loads}",
            },
        )
        + _every_load(results)
    )


def _every_load(results: EvaluationFindings) -> str:
    return listing(
        results.chats,
        {
            "": lambda r: f"{r.source}, {r.config}",
            "per s": lambda r: f"{r.load_per_s:g}",
            "average query latency, ms": lambda r: f"{r.latency:.0f}",
            "later TTFT p50, ms": lambda r: f"{r.later_ttft_p50:.0f}",
            "TPOT, ms": lambda r: f"{r.tpot:.2f}",
            "local": lambda r: f"{r.local_share:.0%}",
            "failed, %": lambda r: f"{100 * r.failed / r.turns:.1f}",
            "paper, %": lambda r: _published_failures(r),
            "KV, GB": lambda r: f"{r.kv_bytes / 1e9:.0f}",
            "buffer, GB": lambda r: f"{r.buffered_bytes / 1e9:.1f}",
        },
    )


def _published_failures(row: ChatResult) -> str:
    pools, _, how = row.config.partition(" ")
    succeeded = ppd_paper.SHAREGPT_PLAIN.get(pools, {}) if row.source == SHAREGPT.name else {}
    if how != "x=0 plain" or row.load_per_s not in succeeded:
        return ""
    return f"{100 - succeeded[row.load_per_s]:.1f}"


def weight_table(results: EvaluationFindings) -> str:
    """Render figure 5: TTFT and TPOT by weight."""
    low, high = ppd_paper.FIGURE_5_TTFT
    floor, peak = ppd_paper.FIGURE_5_TPOT
    about = (
        "Prefill-heavy conversations with 1P3D, changes from plain x=0, where the client hears the "
        f"decode worker only. Paper: TTFT {low:g} to {high:g} %, TPOT +{floor:g} to +{peak:g} %. "
        "Here a short append costs a batch less than the hand-over that it saves, so that TPOT "
        "does not suffer where turns are local, and its weight moves nothing."
    )
    return f"<p>{escape(about)}</p>" + listing(
        results.weighed,
        {
            "": lambda r: f"{r.config}, {r.load_per_s:g}/s",
            "w_tpot": lambda r: "" if r.w_tpot == weights.NO_WEIGHT else f"{r.w_tpot:g}",
            "local, paper": lambda r: f"{ppd_paper.FIGURE_5_LOCAL.get(r.w_tpot, 0)} %",
            "local": lambda r: f"{r.local_share:.0%}",
            "TTFT, ms": lambda r: f"{r.ttft_ms:.0f}",
            "TTFT": lambda r: f"{r.ttft_change:+.0f} %",
            "TPOT": lambda r: f"{r.tpot_change:+.0f} %",
            "failed": lambda r: r.failed,
        },
    )


def turns(results: EvaluationFindings) -> str:
    """Render figure 9a: later turns by number of turns."""
    about = (
        f"Paper: about {ppd_paper.TTFT_ALL_LENGTHS:.0f} % of TTFT from x=0 to x=1 at every length, "
        "while x=0 becomes worse with the context. Replicas and a hybrid stand beside."
    )
    return note(about) + _lengths(results.lengths, "turns")


def models(results: EvaluationFindings) -> str:
    """Render figure 9b: later turns by model."""
    about = (
        f"Paper: about {ppd_paper.TTFT_ALL_LENGTHS:.0f} % with each of three models. Here "
        f"{many_turns.MODEL_POOLS} and two turns."
    )
    return note(about) + _lengths(results.models, "model")


def _lengths(rows: Sequence[TurnCountResult], key: str) -> str:
    x0 = {
        (row.config.partition(" ")[0], row.turns, row.model): row.decode_ttft
        for row in rows
        if row.config.endswith("x=0 plain")
    }

    def change(row: TurnCountResult) -> str:
        base = x0.get((row.config.partition(" ")[0], row.turns, row.model))
        return "" if base is None else f"{100 * (row.decode_ttft / base - 1):+.0f} %"

    return listing(
        rows,
        {
            "": lambda r: r.config,
            key: lambda r: getattr(r, key),
            "TTFT, ms": lambda r: f"{r.ttft:.0f}",
            "decode's, ms": lambda r: f"{r.decode_ttft:.0f}",
            "from plain x=0": change,
            "TPOT, ms": lambda r: f"{r.tpot:.2f}",
            "KV moved, GB": lambda r: f"{r.kv_bytes / 1e9:.1f}",
            "failed": lambda r: f"{r.failed} of {r.requests}",
        },
    )


def first_turns(results: EvaluationFindings) -> str:
    """Render a table of turn-1 TTFT by level of load."""
    levels = list(results.first_turns[0].ttft)
    about = (
        "Medians over points, ms. Behind the authors' proxy clients hear the decode worker only, "
        "Trivium's hear the prefill worker."
    )
    rows = (
        (row.config, *(f"{row.ttft[level]:.0f}" for level in levels))
        for row in results.first_turns
        if row.ttft
    )
    return note(about) + table(("", *levels), rows)


def sensitivity_table(results: EvaluationFindings) -> str:
    """Render table 1 without the constants that were chosen to fit."""
    about = " ".join((sensitivity.__doc__ or "").partition("\n\n")[2].split())
    levels = list(results.varied[0].change)
    rows = (
        (row.name, row.pools, *(f"{row.change[level]:.0f}" for level in levels))
        for row in results.varied
    )
    return f"<p>{escape(about)}</p>" + table(("", "", *levels), rows)

"""Computes the bars and tables of the platform benchmark from its steps and the checker. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from infra.bench.faults.verdict import nought
from infra.bench.results import Bar, at_least, at_most, ratio, table

PROMPTS, LINES = "prompts", "batch.prompts"
RATE_SHARE, TTFT_RATIO, GROWTH, VALID = 0.9, 1.5, 1.2, 0.9999
_PAIR = {
    "missing": "without an answer",
    "double": "with several answers",
    "of_no_prompt": "answers to no prompt",
    "under_another_key": "answers under another key",
    "sent_but_not_there": "acknowledged and not in the log",
    "out_of_order": "answers before an earlier one of their key",
    "error_count": "answered with an error",
    "lag": "not committed",
}
_BATCH = {"missing": "lines missing in its files", "double": "lines there twice",
          "errors": "lines with an error"}  # fmt: skip
_USAGE = {
    "difference_tokens": "tokens off what clients counted",
    "requests_without_record": "requests without a record",
    "extra": "records too many",
    "gaps": "partitions with a gap in numbers",
}
_STEP_COLUMNS = ("answers", "seconds", "rate_per_s", "ttft_ms", "killed", "bridge_mib_max")
_PAIR_COLUMNS = ("prompts", "answers", "missing.count", "double.count", "out_of_order.count",
                 "errors")  # fmt: skip


def bars(findings: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of the parts that ran."""
    judged: list[Bar] = []
    checker = findings.get("checker", {})
    if "answers" in findings:
        judged += _pair_bars("prompts", _pair(checker, PROMPTS))
        judged += _load_bars(findings["answers"])
    if "batch" in findings:
        judged += _pair_bars("lines of the batch", _pair(checker, LINES))
        for path, label in _BATCH.items():
            counts = [batch[path] for batch in checker["batches"]]
            total = sum(n if isinstance(n, int) else n["count"] for n in counts)
            judged.append(at_most(f"batch: {label}", total, 0))
    if checker:
        usage = checker["usage"]
        extra = usage["double"]["count"] + usage["records_without_request"]["count"]
        judged += nought({**usage, "extra": extra}, _USAGE, "usage: ")
        judged += _form_bars("simulated engines", list(checker["pairs"].values()))
    if "vllm" in findings:
        pair = _pair(findings["vllm"]["checker"], PROMPTS)
        amiss = sum(pair[name]["count"] for name in ("missing", "double", "of_no_prompt"))
        judged += _form_bars("a real engine", [pair])
        judged.append(at_most("a real engine: prompts without one answer", amiss, 0))
    return judged


def _pair(checker: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the findings of one pair of topics, whatever their prefix."""
    topics = [t for t in checker["pairs"] if t.endswith(LINES) is (name == LINES)]
    pair: Mapping[str, Any] = checker["pairs"][topics[0]]
    return pair


def _pair_bars(what: str, pair: Mapping[str, Any]) -> list[Bar]:
    return nought({**pair, "error_count": sum(pair["errors"].values())}, _PAIR, f"{what}: ")


def _load_bars(steps: Mapping[str, Any]) -> list[Bar]:
    ttft = {name: step["ttft_ms"]["p99"] for name, step in steps.items()}
    rate = ratio(steps["log"]["rate_per_s"], steps["http"]["rate_per_s"])
    calm, hurt = ratio(ttft["calm"], ttft["idle"]), ratio(ttft["log"], ttft["idle_hurt"])
    memory = steps["log"]["bridge_memory_growth"]
    return [
        at_least("prompts: rate beside HTTP, kills", rate, RATE_SHARE),
        at_most("HTTP TTFT p99 beside prompts, of idle", calm, TTFT_RATIO),
        at_most("HTTP TTFT p99 beside prompts, of idle, both with kills", hurt, TTFT_RATIO),
        at_most("a bridge's memory, last third over first", memory, GROWTH),
    ]


def _form_bars(what: str, pairs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    form_count = sum(pair["forms"]["wanted"] for pair in pairs)
    invalid = sum(pair["forms"]["invalid"]["count"] for pair in pairs)
    share = 1 - invalid / form_count if form_count else None
    return [at_least(f"{what}: answers that keep to their schema", share, VALID)]


def tables(findings: Mapping[str, Any]) -> list[Table]:
    """Return tables of the steps and of the checker's counts."""
    steps = {**findings.get("answers", {})}
    steps |= {name: findings[name] for name in ("batch", "vllm") if name in findings}
    rows = {name: {**row, "killed": sum(row["killed"].values())} for name, row in steps.items()}
    result = [table("Steps", rows, *_STEP_COLUMNS)]
    if checker := findings.get("checker"):
        result.append(table("What the checker counted", checker["pairs"], *_PAIR_COLUMNS))
    return result

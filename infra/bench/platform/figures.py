"""Computes the bars and tables of the platform benchmark from its steps and the checker. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from infra.bench.results import Bar, at_least, at_most, number

PROMPTS, LINES = "prompts", "batch.prompts"
RATE_SHARE, TTFT_RATIO, GROWTH, VALID = 0.9, 1.5, 1.2, 0.9999
_STEPS = {
    "idle": "chats alone",
    "idle_hurt": "chats alone, kills",
    "calm": "prompts",
    "log": "prompts, kills",
    "http": "HTTP, kills",
}


def bars(findings: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of the parts that ran."""
    judged: list[Bar] = []
    checker = findings.get("checker", {})
    if "answers" in findings:
        judged += _pair_bars("prompts", _pair(checker, PROMPTS))
        judged += _load_bars(findings["answers"])
    if "batch" in findings:
        judged += _pair_bars("lines of the batch", _pair(checker, LINES))
        judged += _batch_bars(checker["batches"])
    if checker:
        judged += _usage_bars(checker["usage"])
        judged += _form_bars("simulated engines", list(checker["pairs"].values()))
    if "vllm" in findings:
        pair = _pair(findings["vllm"]["checker"], PROMPTS)
        judged += _form_bars("a real engine", [pair])
        judged.append(at_most("a real engine: prompts without one answer", _amiss(pair), 0, ""))
    return judged


def _pair(checker: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the findings of one pair of topics, whatever their prefix."""
    pairs: Mapping[str, Any] = checker["pairs"]
    line_topics = [name for name in pairs if name.endswith(LINES)]
    topics = (
        line_topics if name == LINES else [topic for topic in pairs if topic not in line_topics]
    )
    pair: Mapping[str, Any] = pairs[topics[0]]
    return pair


def _amiss(pair: Mapping[str, Any]) -> int:
    return sum(pair[name]["count"] for name in ("missing", "double", "of_no_prompt"))


def _pair_bars(what: str, pair: Mapping[str, Any]) -> list[Bar]:
    counts = {
        "missing": "without an answer",
        "double": "with several answers",
        "of_no_prompt": "answers to no prompt",
        "under_another_key": "answers under another key",
        "sent_but_not_there": "acknowledged and not in the log",
        "out_of_order": "answers before an earlier one of their key",
    }
    judged = [
        at_most(f"{what}: {text}", pair[name]["count"], 0, "")
        for name, text in counts.items()
        if pair[name] is not None
    ]
    errors = sum(pair["errors"].values())
    judged.append(at_most(f"{what}: answered with an error", errors, 0, ""))
    judged.append(at_most(f"{what}: not committed", pair["lag"], 0, ""))
    return judged


def _load_bars(steps: Mapping[str, Any]) -> list[Bar]:
    def ttft(name: str) -> float | None:
        value: float | None = steps[name]["ttft_ms"]["p99"]
        return value

    log, http = steps["log"]["rate_per_s"], steps["http"]["rate_per_s"]
    return [
        at_least("prompts: rate beside HTTP, kills", _ratio(log, http), RATE_SHARE, ""),
        at_most(
            "HTTP TTFT p99 beside prompts, of idle", _ratio(ttft("calm"), ttft("idle")),
            TTFT_RATIO, "",
        ),
        at_most(
            "HTTP TTFT p99 beside prompts, of idle, both with kills",
            _ratio(ttft("log"), ttft("idle_hurt")), TTFT_RATIO, "",
        ),
        at_most(
            "a bridge's memory, last third over first", steps["log"]["bridge_memory_growth"],
            GROWTH, "",
        ),
    ]  # fmt: skip


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _batch_bars(batches: Sequence[Mapping[str, Any]]) -> list[Bar]:
    def total(name: str) -> int:
        return sum(batch[name]["count"] for batch in batches)

    errors = sum(batch["errors"] for batch in batches)
    return [
        at_most("batch: lines missing in its files", total("missing"), 0, ""),
        at_most("batch: lines there twice", total("double"), 0, ""),
        at_most("batch: lines with an error", errors, 0, ""),
    ]


def _usage_bars(usage: Mapping[str, Any]) -> list[Bar]:
    unrecorded = usage["requests_without_record"]["count"]
    return [
        at_most("usage: tokens off what clients counted", usage["difference_tokens"], 0, ""),
        at_most("usage: requests without a record", unrecorded, 0, ""),
        at_most("usage: records too many", _extra(usage), 0, ""),
        at_most("usage: partitions with a gap in numbers", usage["gaps"], 0, ""),
    ]


def _extra(usage: Mapping[str, Any]) -> int:
    return int(usage["double"]["count"] + usage["records_without_request"]["count"])


def _form_bars(what: str, pairs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    form_count = sum(pair["forms"]["wanted"] for pair in pairs)
    invalid = sum(pair["forms"]["invalid"]["count"] for pair in pairs)
    share = 1 - invalid / form_count if form_count else None
    return [at_least(f"{what}: answers that keep to their schema", share, VALID, "")]


def tables(findings: Mapping[str, Any]) -> list[Table]:
    """Return tables of the steps and of the checker's counts."""
    steps = {_STEPS[name]: step for name, step in findings.get("answers", {}).items()}
    steps |= {name: findings[part] for part, name in _OTHERS.items() if part in findings}
    table = Table("step", "answers", "s", "per s", "TTFT p50/p99, ms", "killed", "bridge, MiB")
    for name, step in steps.items():
        p50, p99 = (number(step["ttft_ms"][percent]) for percent in ("p50", "p99"))
        table.add_row(
            name, str(step["answers"] or ""), number(step["seconds"]),
            number(step["rate_per_s"] or None), f"{p50}/{p99}",
            str(sum(step["killed"].values()) or ""), number(step["bridge_mib_max"]),
        )  # fmt: skip
    return [table, *([_counted(findings["checker"])] if "checker" in findings else [])]


_OTHERS = {"batch": "batch, kills", "vllm": "a real engine"}


def _counted(checker: Mapping[str, Any]) -> Table:
    table = Table("topic", "prompts", "answers", "missing", "double", "out of order", "errors",
                  title="What the checker counted")  # fmt: skip
    for topic, pair in checker["pairs"].items():
        order = pair["out_of_order"]
        table.add_row(
            topic, str(pair["prompts"]), str(pair["answers"]), str(pair["missing"]["count"]),
            str(pair["double"]["count"]), "-" if order is None else str(order["count"]),
            str(sum(pair["errors"].values())),
        )  # fmt: skip
    return table

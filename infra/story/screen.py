"""Shows a request's story on one screen: the facts, then the steps on a common time axis."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.story.steps import StoryStep, steps_of
from infra.story.story import Story
from infra.terminal.printable import printable
from schemas.records import Request
from schemas.rules.tokens import token_count

BAR_COLUMNS = 28
_LEVELS = "▁▂▃▄▅▆▇█"
_STYLES = {"decision": "magenta", "phase": "cyan", "tokens": "green", "cancellation": "yellow"}


def as_json_value(story: Story) -> dict[str, Any]:
    """Return the records of the story, and its steps."""
    return {**story.as_dict(), "steps": [asdict(step) for step in steps_of(story)]}


def show(story: Story, console: Console) -> None:
    """Print the facts, then the steps on a common time axis."""
    first, *lines = facts(story)
    console.print(Text(printable(first), style="bold"))
    for line in lines:
        console.print(Text(printable(line)))
    steps = steps_of(story)
    span_ms = max([step.after_ms for step in steps] + [1])
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("ms", justify="right")
    table.add_column(f"0 to {span_ms:,} ms", no_wrap=True, width=BAR_COLUMNS)
    table.add_column("who", no_wrap=True)
    table.add_column("what")
    for step in steps:
        style = _STYLES.get(step.kind, "bold")
        what = Text(printable(step.what))
        for detail in step.details:
            what.append(f"\n  {printable(detail)}", style="dim")
        bar = Text(bar_of(step, span_ms, story), style=style)
        table.add_row(f"{step.after_ms:,}", bar, step.who, what)
    console.print(table)


def facts(story: Story) -> list[str]:
    """Return the lines above the steps."""
    request, outcome = story.request, story.outcome
    how = "no outcome on the log yet"
    if outcome is not None:
        took_ms = outcome.ended_ms - request.arrived_ms
        how = f"{outcome.kind.value} in {took_ms:,} ms, attempt {outcome.attempt}"
    second = datetime.fromtimestamp(request.arrived_ms // 1000, UTC)
    arrived = f"{second:%Y-%m-%d %H:%M:%S}.{request.arrived_ms % 1000:03} UTC"
    model = f"{request.adapter} over {request.model}" if request.adapter else request.model
    who = [f"{request.endpoint.value} of {model}", f"class {request.priority.value}"]
    who += [f"tenant {request.tenant}"] if request.tenant else []
    who += [f"session {request.session_id}", f"turn {request.turn + 1}"]
    what = [f"{token_count(request.prompt_tokens)} prompt tokens"]
    what += [f"at most {request.sampling.max_tokens} new"]
    what += [f"deadline after {request.deadline_ms - request.arrived_ms:,} ms", _weights(request)]
    return [
        f"{request.request_id}: {how}",
        f"{', '.join(who)}, arrived {arrived} at {request.gateway_id}",
        ", ".join(what),
        f"{_where(story)}; {_speed(story)}",
    ]


def _weights(request: Request) -> str:
    if request.w_ttft < 0 and request.w_tpot < 0:
        return "weights of its class or the deployment"
    return f"its own weights: ttft {request.w_ttft:g}, tpot {request.w_tpot:g}"


def _where(story: Story) -> str:
    placed = [d for d in story.decisions if d.decode_worker or d.prefill_worker]
    outcome = story.outcome if story.outcome is not None and story.outcome.decode_worker else None
    last = outcome or (placed[-1] if placed else None)
    if last is None:
        return "not placed"
    both = filter(None, (last.prefill_worker, last.decode_worker))
    workers = " → ".join(dict.fromkeys(both))
    orchestration = "" if last.orchestration.value == "none" else f" {last.orchestration.value}"
    moved = f"{story.kv_bytes:,} bytes"
    if story.kv_bytes >= 1_000_000:
        moved = f"{story.kv_bytes / 1e6:,.1f} MB"
    return f"{last.mode.value}{orchestration}: {workers}, {moved} of KV over NIXL"


def _speed(story: Story) -> str:
    if story.ttft_ms is None:
        return "no tokens"
    tpot = f", TPOT {story.tpot_ms:.2f} ms" if story.tpot_ms is not None else ""
    return f"TTFT {story.ttft_ms:,} ms{tpot}, {len(story.token_ids)} tokens"


def bar_of(step: StoryStep, span_ms: int, story: Story) -> str:
    """Draw a step on the axis: a dot, a line for its duration, or a profile of tokens."""
    scale = (BAR_COLUMNS - 1) / span_ms
    last = min(max(round(step.after_ms * scale), 0), BAR_COLUMNS - 1)
    first = min(max(round((step.after_ms - step.took_ms) * scale), 0), last)
    if step.kind == "tokens" and step.took_ms:
        return " " * first + _profile(story, scale, first, last)
    return " " * first + "━" * (last - first) + "●"


def _profile(story: Story, scale: float, first: int, last: int) -> str:
    counts = [0] * (last - first + 1)
    for row in story.rows:
        place = round((row.at_ms - story.request.arrived_ms) * scale)
        counts[min(max(place, first), last) - first] += row.tokens
    peak = max(counts)
    return "".join(
        _LEVELS[(count * (len(_LEVELS) - 1) + peak - 1) // peak] if count else " "
        for count in counts
    )

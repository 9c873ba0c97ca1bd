"""What a trace holds: how many requests, how long, how dense, and how much of it begins alike."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from infra.traces.trace import Arrival, Trace

_MINUTE_MS = 60_000.0
_PERCENTS = (50, 90, 99)
_BARS = " ▁▂▃▄▅▆▇█"


def rates(arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Requests/s, mean and of the busiest minute; a shorter trace counts as one as long as it
    is.
    """
    times = [each.at_ms for each in arrivals]
    length_ms = max(times) - min(times)
    window_ms = min(_MINUTE_MS, length_ms) or 1.0
    windows = Counter(int((at_ms - min(times)) / window_ms) for at_ms in times)
    mean_per_s = 1e3 * len(arrivals) / max(length_ms, window_ms)
    return mean_per_s, 1e3 * max(windows.values()) / window_ms


def summary(trace: Trace) -> dict[str, Any]:
    """As `trivium trace show --json` has it; lengths in tokens, times in ms."""
    arrivals = trace.arrivals
    turns = Counter(each.session_id for each in arrivals if each.session_id)
    mean_per_s, busiest_per_s = rates(arrivals)
    found: dict[str, Any] = {
        "format": trace.format,
        "requests": len(arrivals),
        "sessions": len(turns),
        "turns_max": max(turns.values(), default=0),
        "duration_s": round((arrivals[-1].at_ms - arrivals[0].at_ms) / 1e3, 3),
        "mean_per_s": round(mean_per_s, 3),
        "busiest_per_s": round(busiest_per_s, 3),
        "block_tokens": trace.block_tokens,
        "begins_alike": round(_begins_alike(trace), 4),
        "left_out": dict(trace.left_out),
    }
    for name in ("prompt_tokens", "output_tokens", "ttft_ms", "total_ms"):
        told = [getattr(each, name) for each in arrivals if getattr(each, name) is not None]
        found[name] = _figures(told) if told else None
    return found


def _begins_alike(trace: Trace) -> float:
    """The share of prompt tokens in blocks that an earlier prompt had: what a prefix cache without
    a bound could find.
    """
    seen, alike = set[int](), 0
    for each in trace.arrivals:
        for number, block in enumerate(each.blocks):
            if block not in seen:
                break
            alike += min(trace.block_tokens, each.prompt_tokens - number * trace.block_tokens)
        seen.update(each.blocks)
    return alike / max(1, sum(each.prompt_tokens for each in trace.arrivals))


def _figures(values: Sequence[float]) -> dict[str, float]:
    found: dict[str, Any] = {f"p{each}": np.percentile(values, each) for each in _PERCENTS}
    found |= {"mean": np.mean(values), "max": max(values)}
    return {name: round(float(value), 3) for name, value in found.items()}


def bars(trace: Trace, columns: int, weight: str = "") -> str:
    """Requests over time, or the sum of one of their figures, as one line of bars."""
    times = np.array([each.at_ms for each in trace.arrivals])
    weights = [getattr(each, weight) for each in trace.arrivals] if weight else None
    counts, _ = np.histogram(times, bins=columns, weights=weights)
    heights = np.ceil(counts / max(counts.max(), 1) * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[height] for height in heights)

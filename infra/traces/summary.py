"""Summarizes a trace: number of requests, duration, rates, and how many prompts share prefixes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from infra.traces.trace import Arrival, Trace

_MINUTE_MS = 60_000.0
_PERCENTS = (50, 90, 99)
_BARS = " ▁▂▃▄▅▆▇█"


def rates(arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Return requests/s: the mean, and the busiest minute's (or of a shorter trace)."""
    times = [arrival.at_ms for arrival in arrivals]
    length_ms = max(times) - min(times)
    window_ms = min(_MINUTE_MS, length_ms) or 1.0
    windows = Counter(int((at_ms - min(times)) / window_ms) for at_ms in times)
    mean_per_s = 1e3 * len(arrivals) / max(length_ms, window_ms)
    return mean_per_s, 1e3 * max(windows.values()) / window_ms


def summary(trace: Trace) -> dict[str, Any]:
    """Return the figures of `trivium trace show --json`: lengths in tokens, times in ms."""
    arrivals = trace.arrivals
    turns = Counter(arrival.session_id for arrival in arrivals if arrival.session_id)
    mean_per_s, busiest_per_s = rates(arrivals)
    figures: dict[str, Any] = {
        "format": trace.format,
        "requests": len(arrivals),
        "sessions": len(turns),
        "turns_max": max(turns.values(), default=0),
        "duration_s": round((arrivals[-1].at_ms - arrivals[0].at_ms) / 1e3, 3),
        "mean_per_s": round(mean_per_s, 3),
        "busiest_per_s": round(busiest_per_s, 3),
        "block_tokens": trace.block_tokens,
        "begins_alike": round(_shared_prefix_ratio(trace), 4),
        "left_out": dict(trace.left_out),
    }
    for name in ("prompt_tokens", "output_tokens", "ttft_ms", "total_ms"):
        values = [
            getattr(arrival, name) for arrival in arrivals if getattr(arrival, name) is not None
        ]
        figures[name] = _figures(values) if values else None
    return figures


def _shared_prefix_ratio(trace: Trace) -> float:
    """Return the share of prompt tokens in blocks that an earlier prompt had.

    An unbounded prefix cache could hit that share.
    """
    seen_blocks, shared_tokens = set[int](), 0
    for arrival in trace.arrivals:
        for number, block in enumerate(arrival.blocks):
            if block not in seen_blocks:
                break
            shared_tokens += min(
                trace.block_tokens, arrival.prompt_tokens - number * trace.block_tokens
            )
        seen_blocks.update(arrival.blocks)
    return shared_tokens / max(1, sum(arrival.prompt_tokens for arrival in trace.arrivals))


def _figures(values: Sequence[float]) -> dict[str, float]:
    figures: dict[str, Any] = {
        f"p{percent}": np.percentile(values, percent) for percent in _PERCENTS
    }
    figures |= {"mean": np.mean(values), "max": max(values)}
    return {name: round(float(value), 3) for name, value in figures.items()}


def bars(trace: Trace, columns: int, weight: str = "") -> str:
    """Return requests over time, or the sum of one of their fields, as one line of bars."""
    times = np.array([arrival.at_ms for arrival in trace.arrivals])
    weights = [getattr(arrival, weight) for arrival in trace.arrivals] if weight else None
    counts, _ = np.histogram(times, bins=columns, weights=weights)
    heights = np.ceil(counts / max(counts.max(), 1) * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[height] for height in heights)

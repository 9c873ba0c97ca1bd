"""Reports measurements with the names, units and definitions of aiperf's summary.

Sources: aiperf's metrics reference and the schema of `profile_export_aiperf.json`. Latencies count
from when a request was sent, to chunks with text. The replay_sched_lag figures show how late
requests were sent: relative to the least late one, among requests that waited only for their time.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from infra.traces.sender import SentRequest

SCHEMA_VERSION = "1.1"
_PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_LAG_PERCENTS = (50, 90, 99)


def report(requests: Sequence[SentRequest]) -> dict[str, Any]:
    """Return the figures of complete answers; errors are counted separately."""
    good = [request for request in requests if not request.error and request.chunks_s]
    bad = [
        request.error or "empty answer"
        for request in requests
        if request.error or not request.chunks_s
    ]
    errors = Counter(bad)
    figures: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "request_count": _scalar(len(good), "requests"),
        "error_request_count": _scalar(len(bad), "requests"),
        "error_summary": [
            {"error_details": {"type": error}, "count": count}
            for error, count in errors.most_common()
        ],
    }
    if good:
        figures |= _distributions(good) | _totals(good)
    offsets = [
        request.sent_s - request.due_s
        for request in requests
        if request.is_scheduled and request.sent_s
    ]
    for percent in _LAG_PERCENTS if offsets else ():
        late_ms = (float(np.percentile(offsets, percent)) - min(offsets)) * 1e3
        figures[f"replay_sched_lag_p{percent}"] = _scalar(late_ms, "ms")
    return figures


def _distributions(good: Sequence[SentRequest]) -> dict[str, Any]:
    itl_ms = [_itl_ms(request) for request in good if request.output_tokens > 1]
    figures = {
        "request_latency": ([_latency_ms(request) for request in good], "ms"),
        "time_to_first_token": ([_ttft_ms(request) for request in good], "ms"),
        "time_to_second_token": (
            [(e.chunks_s[1] - e.chunks_s[0]) * 1e3 for e in good if len(e.chunks_s) > 1],
            "ms",
        ),
        "inter_token_latency": (itl_ms, "ms"),
        "output_token_throughput_per_user": (
            [1e3 / gap_ms for gap_ms in itl_ms if gap_ms > 0],
            "tokens/sec/user",
        ),
        "output_sequence_length": ([float(request.output_tokens) for request in good], "tokens"),
        "input_sequence_length": ([float(request.prompt_tokens) for request in good], "tokens"),
    }
    return {name: _record(values, unit) for name, (values, unit) in figures.items() if values}


def _totals(good: Sequence[SentRequest]) -> dict[str, Any]:
    duration_s = max(request.chunks_s[-1] for request in good) - min(
        request.sent_s for request in good
    )
    total_isl = sum(request.prompt_tokens for request in good)
    total_osl = sum(request.output_tokens for request in good)
    return {
        "benchmark_duration": _scalar(duration_s, "sec"),
        "request_throughput": _scalar(len(good) / duration_s, "requests/sec"),
        "output_token_throughput": _scalar(total_osl / duration_s, "tokens/sec"),
        "total_isl": _scalar(total_isl, "tokens"),
        "total_osl": _scalar(total_osl, "tokens"),
    }


def _latency_ms(request: SentRequest) -> float:
    return (request.chunks_s[-1] - request.sent_s) * 1e3


def _ttft_ms(request: SentRequest) -> float:
    return (request.chunks_s[0] - request.sent_s) * 1e3


def _itl_ms(request: SentRequest) -> float:
    """Return aiperf's latency between tokens: the time after the first, per later token."""
    return (_latency_ms(request) - _ttft_ms(request)) / (request.output_tokens - 1)


def _scalar(value: float, unit: str) -> dict[str, Any]:
    return {"unit": unit, "avg": round(value, 3)}


def _record(values: Sequence[float], unit: str) -> dict[str, Any]:
    stats: dict[str, Any] = {
        "avg": np.mean(values),
        "min": min(values),
        "max": max(values),
        "std": np.std(values, ddof=1) if len(values) > 1 else 0.0,
        "sum": sum(values),
    }
    stats |= {f"p{percent}": np.percentile(values, percent) for percent in _PERCENTS}
    rounded = {name: round(float(value), 3) for name, value in stats.items()}
    return {"unit": unit, "count": len(values), **rounded}

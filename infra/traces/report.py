"""What was measured, with the names, units and definitions of aiperf's summary.

By its metrics reference and the schema of `profile_export_aiperf.json`. Latencies count from when a
request was sent, to chunks with text; how late that was, the replay_sched_lag figures tell: against
the least late request, of those that waited for nothing but their time.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from infra.traces.sending import Sent

SCHEMA_VERSION = "1.1"
_PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_LAG_PERCENTS = (50, 90, 99)


def report(sent: Sequence[Sent]) -> dict[str, Any]:
    """Of answers that came whole; errors are counted beside them."""
    good = [each for each in sent if not each.error and each.chunks_s]
    bad = [each.error or "empty answer" for each in sent if each.error or not each.chunks_s]
    errors = Counter(bad)
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "request_count": _scalar(len(good), "requests"),
        "error_request_count": _scalar(len(bad), "requests"),
        "error_summary": [
            {"error_details": {"type": error}, "count": count}
            for error, count in errors.most_common()
        ],
    }
    if good:
        found |= _distributions(good) | _totals(good)
    offsets = [each.sent_s - each.due_s for each in sent if each.is_scheduled and each.sent_s]
    for percent in _LAG_PERCENTS if offsets else ():
        late_ms = (float(np.percentile(offsets, percent)) - min(offsets)) * 1e3
        found[f"replay_sched_lag_p{percent}"] = _scalar(late_ms, "ms")
    return found


def _distributions(good: Sequence[Sent]) -> dict[str, Any]:
    itl_ms = [_itl_ms(each) for each in good if each.output_tokens > 1]
    found = {
        "request_latency": ([_latency_ms(each) for each in good], "ms"),
        "time_to_first_token": ([_ttft_ms(each) for each in good], "ms"),
        "time_to_second_token": (
            [(e.chunks_s[1] - e.chunks_s[0]) * 1e3 for e in good if len(e.chunks_s) > 1],
            "ms",
        ),
        "inter_token_latency": (itl_ms, "ms"),
        "output_token_throughput_per_user": (
            [1e3 / each for each in itl_ms if each > 0],
            "tokens/sec/user",
        ),
        "output_sequence_length": ([float(each.output_tokens) for each in good], "tokens"),
        "input_sequence_length": ([float(each.prompt_tokens) for each in good], "tokens"),
    }
    return {name: _record(values, unit) for name, (values, unit) in found.items() if values}


def _totals(good: Sequence[Sent]) -> dict[str, Any]:
    duration_s = max(each.chunks_s[-1] for each in good) - min(each.sent_s for each in good)
    total_isl = sum(each.prompt_tokens for each in good)
    total_osl = sum(each.output_tokens for each in good)
    return {
        "benchmark_duration": _scalar(duration_s, "sec"),
        "request_throughput": _scalar(len(good) / duration_s, "requests/sec"),
        "output_token_throughput": _scalar(total_osl / duration_s, "tokens/sec"),
        "total_isl": _scalar(total_isl, "tokens"),
        "total_osl": _scalar(total_osl, "tokens"),
    }


def _latency_ms(sent: Sent) -> float:
    return (sent.chunks_s[-1] - sent.sent_s) * 1e3


def _ttft_ms(sent: Sent) -> float:
    return (sent.chunks_s[0] - sent.sent_s) * 1e3


def _itl_ms(sent: Sent) -> float:
    """aiperf's: what follows the first token, by as many tokens."""
    return (_latency_ms(sent) - _ttft_ms(sent)) / (sent.output_tokens - 1)


def _scalar(value: float, unit: str) -> dict[str, Any]:
    return {"unit": unit, "avg": round(value, 3)}


def _record(values: Sequence[float], unit: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "avg": np.mean(values),
        "min": min(values),
        "max": max(values),
        "std": np.std(values, ddof=1) if len(values) > 1 else 0.0,
        "sum": sum(values),
    }
    found |= {f"p{percent}": np.percentile(values, percent) for percent in _PERCENTS}
    rounded = {name: round(float(value), 3) for name, value in found.items()}
    return {"unit": unit, "count": len(values), **rounded}

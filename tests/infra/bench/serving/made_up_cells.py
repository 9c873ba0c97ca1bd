"""Cells of the serving benchmark that nobody measured."""

from typing import Any


def cell(rate: float, ttft_ms: float, cpu_ms: float = 2.0, **errors: int) -> dict[str, Any]:
    times = {"p50": ttft_ms, "p90": ttft_ms, "p99": 2 * ttft_ms}
    return {
        "requests": 10,
        "errors": errors,
        "requests_per_s": rate,
        "ttft_ms": times,
        "gap_ms": times,
        "answer_ms": times,
        "tokens_per_read": 1.0,
        "client_cpu_share": 0.1,
        "other_cpu_share": 0.2,
        "cpu_ms": {"engine": cpu_ms},
    }

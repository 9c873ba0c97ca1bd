"""The lines that our processes write: nothing of ours is left out, repetitions of libraries are."""

import logging

from infra.processes.log_lines import RateLimitFilter


def record(name: str, line: int, number: int) -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, "client.py", line, "try %d", (number,), None)


def test_rate_limit_filter_passes_library_line_once_in_ten_seconds() -> None:
    now_s = 100.0
    seldom = RateLimitFilter("aiokafka", lambda: now_s)
    decisions = [seldom.filter(record("aiokafka.client", 7, number)) for number in range(4)]
    assert decisions == [True, False, False, False]
    assert seldom.filter(record("aiokafka.client", 8, 0)), "another place"
    now_s += 10
    later = record("aiokafka.client", 7, 4)
    assert seldom.filter(later)
    assert later.getMessage() == "try 4 (3 like it since the last one)"


def test_rate_limit_filter_passes_other_loggers() -> None:
    seldom = RateLimitFilter("aiokafka", lambda: 0.0)
    assert all(seldom.filter(record("streams.gateway", 7, number)) for number in range(3))

"""Figures with aiperf's names and definitions."""

from infra.traces.report import report
from infra.traces.sender import SentRequest
from infra.traces.trace import Arrival


def sent_request(sent_s: float, *chunks_s: float, **changes: object) -> SentRequest:
    """Return 5 tokens for a prompt of 10, sent a tenth of a second after its due time."""
    request = SentRequest(
        arrival=Arrival(at_ms=0, prompt_tokens=10, output_tokens=5),
        due_s=sent_s - 0.1,
        sent_s=sent_s,
        chunks_s=list(chunks_s),
        prompt_tokens=10,
        output_tokens=5,
    )
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def test_report_defines_latencies_as_aiperf_does() -> None:
    """TTFT to the first chunk, latency to the last, ITL their difference by tokens less one."""
    figures = report([sent_request(0.0, 0.1, 0.15, 0.5), sent_request(1.0, 1.3, 1.4, 2.1)])
    assert (figures["time_to_first_token"]["p50"], figures["time_to_first_token"]["unit"]) == (
        200,
        "ms",
    )
    assert figures["time_to_second_token"]["max"] == 100
    assert (figures["request_latency"]["min"], figures["request_latency"]["max"]) == (500, 1_100)
    assert (figures["inter_token_latency"]["min"], figures["inter_token_latency"]["max"]) == (
        100,
        200,
    )
    assert figures["output_token_throughput_per_user"]["max"] == 10
    assert figures["request_latency"]["count"] == figures["request_count"]["avg"] == 2
    assert figures["request_latency"]["sum"] == 1_600
    assert figures["benchmark_duration"] == {"unit": "sec", "avg": 2.1}
    assert figures["request_throughput"] == {"unit": "requests/sec", "avg": 0.952}
    assert figures["output_token_throughput"]["avg"] == 4.762
    assert (figures["total_isl"]["avg"], figures["total_osl"]["avg"]) == (20, 10)


def test_report_counts_errors_and_empty_answers_apart() -> None:
    late = [sent_request(0.0, 0.2), sent_request(0.0, 0.1, error="queue_full"), sent_request(0.0)]
    figures = report(late)
    assert (figures["request_count"]["avg"], figures["error_request_count"]["avg"]) == (1, 2)
    assert figures["request_latency"]["count"] == 1
    summary = {row["error_details"]["type"]: row["count"] for row in figures["error_summary"]}
    assert summary == {"queue_full": 1, "empty answer": 1}
    assert "request_latency" not in report(late[1:])


def test_report_measures_lag_of_scheduled_requests_only() -> None:
    figures = report(
        [
            sent_request(1.0, 2.0),
            sent_request(1.0, 2.0, due_s=0.6),
            sent_request(9.0, 9.5, due_s=0.0, is_scheduled=False),
        ]
    )
    assert figures["replay_sched_lag_p50"] == {"unit": "ms", "avg": 150}
    assert "replay_sched_lag_p50" not in report([sent_request(9.0, 9.5, is_scheduled=False)])

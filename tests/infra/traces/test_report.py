"""Figures with aiperf's names and definitions."""

from infra.traces.report import report
from infra.traces.sender import SentRequest
from infra.traces.trace import Arrival


def sent(sent_s: float, *chunks_s: float, **changes: object) -> SentRequest:
    """An answer of 5 tokens to a prompt of 10, which was due a tenth of a second before."""
    found = SentRequest(
        arrival=Arrival(at_ms=0, prompt_tokens=10, output_tokens=5),
        due_s=sent_s - 0.1,
        sent_s=sent_s,
        chunks_s=list(chunks_s),
        prompt_tokens=10,
        output_tokens=5,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_latencies_are_defined_as_aiperf_does() -> None:
    """TTFT to the first chunk, latency to the last, ITL their difference by tokens less one."""
    found = report([sent(0.0, 0.1, 0.15, 0.5), sent(1.0, 1.3, 1.4, 2.1)])
    assert (found["time_to_first_token"]["p50"], found["time_to_first_token"]["unit"]) == (
        200,
        "ms",
    )
    assert found["time_to_second_token"]["max"] == 100
    assert (found["request_latency"]["min"], found["request_latency"]["max"]) == (500, 1_100)
    assert (found["inter_token_latency"]["min"], found["inter_token_latency"]["max"]) == (100, 200)
    assert found["output_token_throughput_per_user"]["max"] == 10
    assert found["request_latency"]["count"] == found["request_count"]["avg"] == 2
    assert found["request_latency"]["sum"] == 1_600
    assert found["benchmark_duration"] == {"unit": "sec", "avg": 2.1}
    assert found["request_throughput"] == {"unit": "requests/sec", "avg": 0.952}
    assert found["output_token_throughput"]["avg"] == 4.762
    assert (found["total_isl"]["avg"], found["total_osl"]["avg"]) == (20, 10)


def test_errors_are_counted_beside_and_empty_answers_are_errors() -> None:
    late = [sent(0.0, 0.2), sent(0.0, 0.1, error="queue_full"), sent(0.0)]
    found = report(late)
    assert (found["request_count"]["avg"], found["error_request_count"]["avg"]) == (1, 2)
    assert found["request_latency"]["count"] == 1
    summary = {each["error_details"]["type"]: each["count"] for each in found["error_summary"]}
    assert summary == {"queue_full": 1, "empty answer": 1}
    assert "request_latency" not in report(late[1:])


def test_lag_is_against_the_least_late_and_of_scheduled_requests() -> None:
    found = report(
        [sent(1.0, 2.0), sent(1.0, 2.0, due_s=0.6), sent(9.0, 9.5, due_s=0.0, is_scheduled=False)]
    )
    assert found["replay_sched_lag_p50"] == {"unit": "ms", "avg": 150}
    assert "replay_sched_lag_p50" not in report([sent(9.0, 9.5, is_scheduled=False)])

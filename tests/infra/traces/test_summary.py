"""What a trace holds."""

from infra.traces.summary import bars, rates, summary
from infra.traces.trace import Arrival, Trace


def arrival(at_ms: float, tokens: int, *blocks: int, session_id: str = "") -> Arrival:
    """Return a request with these blocks."""
    return Arrival(
        at_ms=at_ms, prompt_tokens=tokens, output_tokens=5, blocks=blocks, session_id=session_id
    )


def test_summary_counts_requests_rates_and_shared_prefixes() -> None:
    trace = Trace(
        format="test",
        block_tokens=10,
        arrivals=[
            arrival(0, 20, 1, 2, session_id="a"),
            arrival(500, 25, 1, 2, 3, session_id="a"),
            arrival(1_000, 15, 4, 2),  # the same block behind another beginning is another one
            arrival(2_000, 20, 1, 5, session_id="b"),
        ],
    )
    figures = summary(trace)
    assert (figures["requests"], figures["sessions"], figures["turns_max"]) == (4, 2, 2)
    assert (figures["duration_s"], figures["mean_per_s"]) == (2.0, 2.0)
    assert figures["begins_alike"] == 30 / 80
    assert (figures["prompt_tokens"]["p50"], figures["prompt_tokens"]["max"]) == (20.0, 25.0)
    assert figures["ttft_ms"] is None


def test_rates_include_busiest_minute() -> None:
    arrivals = [arrival(1e3 * second, 1) for second in range(61)] + [arrival(59_500, 1)] * 59
    mean_per_s, busiest_per_s = rates(sorted(arrivals, key=lambda request: request.at_ms))
    assert (mean_per_s, round(busiest_per_s, 3)) == (2.0, 1.983)
    assert rates(arrivals[:1]) == (1e3, 1e3)


def test_bars_show_load_over_time() -> None:
    trace = Trace(format="test", arrivals=[arrival(0, 1)] * 8 + [arrival(99, 1)])
    assert bars(trace, 4) == "█  ▁"
    assert bars(trace, 2, "prompt_tokens") == "█▁"

"""Prompts that are made for a trace: equal where its blocks are."""

from infra.traces.prompts import body, token_ids
from infra.traces.trace import Arrival, Trace, scale_trace


def trace(*arrivals: Arrival, block_tokens: int = 16) -> Trace:
    """Return a trace of these requests."""
    return Trace(format="test", arrivals=arrivals, block_tokens=block_tokens)


def arrival(prompt_tokens: int, *blocks: int, session_id: str = "", at_ms: float = 0) -> Arrival:
    """Return a request with these blocks."""
    return Arrival(
        at_ms=at_ms,
        prompt_tokens=prompt_tokens,
        output_tokens=3,
        blocks=blocks,
        session_id=session_id,
    )


def test_prompts_share_tokens_of_equal_blocks() -> None:
    base_request, sibling_request = arrival(40, 1, 2, 3), arrival(48, 1, 2, 4)
    sample_trace = trace(base_request, sibling_request)
    first, second = token_ids(sample_trace, base_request), token_ids(sample_trace, sibling_request)
    assert (len(first), len(second)) == (40, 48)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:40]
    assert token_ids(sample_trace, base_request) == first
    assert all(32 <= token_id < 256 for token_id in first)


def test_prompts_without_block_ids_share_prefix_only_in_session() -> None:
    first, second = arrival(20, session_id="s"), arrival(50, session_id="s", at_ms=1)
    alone, last = arrival(50, at_ms=2), arrival(50, at_ms=3)
    sample_trace = trace(first, second, alone, last)
    assert token_ids(sample_trace, second)[:20] == token_ids(sample_trace, first)
    assert len({tuple(token_ids(sample_trace, request)) for request in (second, alone, last)}) == 3


def test_scaled_trace_keeps_shared_prefixes() -> None:
    base_request, sibling_request = arrival(40, 1, 2, 3), arrival(33, 1, 2, 4)
    small = scale_trace(trace(base_request, sibling_request), 0.25)
    assert (small.block_tokens, [request.prompt_tokens for request in small.arrivals]) == (
        4,
        [10, 9],
    )
    assert [request.output_tokens for request in small.arrivals] == [1, 1]
    first, second = (token_ids(small, request) for request in small.arrivals)
    assert first[:8] == second[:8]
    assert first[8] != second[8]


def test_request_body_asks_for_trace_length_or_one_token() -> None:
    none = Arrival(at_ms=0, prompt_tokens=4, output_tokens=0)
    assert body(trace(none), none, "m")["max_tokens"] == 1
    request = arrival(4)
    payload = body(trace(request), request, "m")
    assert (payload["model"], payload["max_tokens"], payload["ignore_eos"]) == ("m", 3, True)

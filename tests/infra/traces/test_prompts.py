"""Prompts that are made for a trace: equal where its blocks are."""

from infra.traces.prompts import body, token_ids
from infra.traces.trace import Arrival, Trace, scale_trace


def trace(*arrivals: Arrival, block_tokens: int = 16) -> Trace:
    """Of these requests."""
    return Trace(format="test", arrivals=arrivals, block_tokens=block_tokens)


def arrival(prompt_tokens: int, *blocks: int, session_id: str = "", at_ms: float = 0) -> Arrival:
    """A request with these blocks."""
    return Arrival(
        at_ms=at_ms,
        prompt_tokens=prompt_tokens,
        output_tokens=3,
        blocks=blocks,
        session_id=session_id,
    )


def test_prompts_are_equal_as_far_as_their_blocks_are() -> None:
    one, two = arrival(40, 1, 2, 3), arrival(48, 1, 2, 4)
    found = trace(one, two)
    first, second = token_ids(found, one), token_ids(found, two)
    assert (len(first), len(second)) == (40, 48)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:40]
    assert token_ids(found, one) == first
    assert all(32 <= each < 256 for each in first)


def test_turns_without_block_ids_extend_each_other_and_others_share_nothing() -> None:
    first, second = arrival(20, session_id="s"), arrival(50, session_id="s", at_ms=1)
    alone, other = arrival(50, at_ms=2), arrival(50, at_ms=3)
    found = trace(first, second, alone, other)
    assert token_ids(found, second)[:20] == token_ids(found, first)
    assert len({tuple(token_ids(found, each)) for each in (second, alone, other)}) == 3


def test_a_smaller_trace_keeps_what_is_equal() -> None:
    one, two = arrival(40, 1, 2, 3), arrival(33, 1, 2, 4)
    small = scale_trace(trace(one, two), 0.25)
    assert (small.block_tokens, [each.prompt_tokens for each in small.arrivals]) == (4, [10, 9])
    assert [each.output_tokens for each in small.arrivals] == [1, 1]
    first, second = (token_ids(small, each) for each in small.arrivals)
    assert first[:8] == second[:8]
    assert first[8] != second[8]


def test_an_answer_is_as_long_as_the_traces_and_one_token_at_least() -> None:
    none = Arrival(at_ms=0, prompt_tokens=4, output_tokens=0)
    assert body(trace(none), none, "m")["max_tokens"] == 1
    one = arrival(4)
    asked = body(trace(one), one, "m")
    assert (asked["model"], asked["max_tokens"], asked["ignore_eos"]) == ("m", 3, True)

"""Which answers go on, and behind what."""

from dataclasses import replace

from schemas.records import Continued, Request, Sampling
from schemas.rules.continuing import awaits_progress, may_continue, prior_answer
from schemas.rules.sizes import PRIOR_BYTES_MAX, check_size
from schemas.rules.tokens import pack_tokens
from tests.schemas.examples import example


def plain_request(max_tokens: int = 16) -> Request:
    request = example("trivium.Request")
    assert isinstance(request, Request)
    sampling = Sampling(max_tokens=max_tokens, seed=7)
    return replace(request, sampling=sampling, retrieval=None)


def so_far(tokens: bytes, chars: int = 0) -> Continued:
    return Continued(
        request_id="r1",
        session_id="s1",
        attempt=1,
        tokens=tokens,
        chars=chars,
        written_by="gateway-a",
        at_ms=1,
    )


def test_answer_continues_after_prior_tokens() -> None:
    continued = so_far(pack_tokens([5, 6]), 7)
    assert prior_answer(plain_request(), continued) == (continued.tokens, 7)
    assert prior_answer(plain_request(), None) == (b"", 0)


def test_answer_too_large_for_request_restarts() -> None:
    """A request leaves room for so many tokens, and its work never grows too large."""
    largest_answer = so_far(bytes(PRIOR_BYTES_MAX))
    check_size(largest_answer, PRIOR_BYTES_MAX + 1_000)
    assert prior_answer(plain_request(1 << 20), largest_answer) == (largest_answer.tokens, 0)
    larger_answer = replace(largest_answer, tokens=bytes(PRIOR_BYTES_MAX + 4))
    assert prior_answer(plain_request(1 << 20), larger_answer) == (b"", 0)


def test_request_continues_with_any_sampling() -> None:
    plain, whole = plain_request(), example("trivium.Request")
    assert isinstance(whole, Request) and whole.sampling.structured and whole.sampling.stop
    assert may_continue(replace(plain, sampling=whole.sampling))


def test_probing_request_awaits_progress_and_restarts() -> None:
    """Passages that were inserted before a token was read are known by then."""
    plain, whole = plain_request(), example("trivium.Request")
    assert isinstance(whole, Request) and whole.retrieval and whole.retrieval.probing
    searching = replace(plain, retrieval=whole.retrieval)
    for continues in (True, False):
        assert awaits_progress(searching, continues=continues)
        assert awaits_progress(plain, continues=continues) == continues
    assert prior_answer(searching, so_far(pack_tokens([5, 6]), 7)) == (b"", 0)

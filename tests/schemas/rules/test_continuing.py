"""Which answers go on, and behind what."""

from dataclasses import replace

from schemas.records import Continued, Request, Sampling
from schemas.rules.continuing import awaits_progress, may_continue, prior_answer
from schemas.rules.sizes import PRIOR_BYTES_MAX, check_size
from schemas.rules.tokens import pack_tokens
from tests.schemas.examples import example


def asked(max_tokens: int = 16) -> Request:
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


def test_an_answer_goes_on_behind_its_tokens() -> None:
    continued = so_far(pack_tokens([5, 6]), 7)
    assert prior_answer(asked(), continued) == (continued.tokens, 7)
    assert prior_answer(asked(), None) == (b"", 0)


def test_what_a_request_has_no_room_for_begins_anew() -> None:
    """A request leaves room for so much, and work is never too large over it."""
    most = so_far(bytes(PRIOR_BYTES_MAX))
    check_size(most, PRIOR_BYTES_MAX + 1_000)
    assert prior_answer(asked(1 << 20), most) == (most.tokens, 0)
    more = replace(most, tokens=bytes(PRIOR_BYTES_MAX + 4))
    assert prior_answer(asked(1 << 20), more) == (b"", 0)


def test_sampling_goes_on_and_what_is_kept_beside_the_tokens_does_not() -> None:
    plain = asked()
    drawn = replace(plain.sampling, temperature=0.9, seed=3, logprobs=2, min_tokens=4)
    assert may_continue(replace(plain, sampling=drawn))
    assert not may_continue(replace(plain, sampling=replace(drawn, stop=("x",))))


def test_what_searches_during_its_answer_waits_for_word_and_begins_anew() -> None:
    """What was put in before a token that somebody reads is known then."""
    plain, whole = asked(), example("trivium.Request")
    assert isinstance(whole, Request) and whole.retrieval and whole.retrieval.probing
    searching = replace(plain, retrieval=whole.retrieval)
    formed = replace(plain, sampling=replace(plain.sampling, stop=("x",)))
    for continues in (True, False):
        assert awaits_progress(searching, continues=continues)
        assert awaits_progress(plain, continues=continues) == continues
        assert not awaits_progress(formed, continues=continues)
    assert prior_answer(searching, so_far(pack_tokens([5, 6]), 7)) == (b"", 0)

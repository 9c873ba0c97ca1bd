"""Stop strings over pieces, and what a first token's text may already show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import Sampling
from workers.llm.stop_strings import StopText, certain_text


def feed_pieces(
    pieces: list[str], stops: list[str], *, include_stop: bool = False
) -> tuple[str, str]:
    """What is shown of an answer in these pieces, and the stop that ended it."""
    text, out = StopText(stops, include_stop=include_stop), ""
    for piece in pieces:
        out += text.feed(piece)
        if text.matched_stop:
            return out, text.matched_stop
    return out + text.flush(), ""


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["one", " two"], [], ("one two", "")),
        (["one", " two"], [" t"], ("one", " t")),
        (["a", "b", "c", "d"], ["bc"], ("a", "bc")),
        (["a", "b", "x"], ["bc"], ("abx", "")),
        (["aab"], ["ab", "aab"], ("", "aab")),  # the one that begins first
        (["aa", "ab"], ["aab"], ("a", "aab")),  # a false start within
        (["ab"], ["abc"], ("ab", "")),
        (["ab"], [""], ("ab", "")),
    ],
)
def test_stop_text_ends_at_first_stop_string(
    pieces: list[str], stops: list[str], expected: tuple[str, str]
) -> None:
    assert feed_pieces(pieces, stops) == expected


def test_stop_text_includes_stop_string_on_request() -> None:
    assert feed_pieces(["a", "b", "cd"], ["bc"], include_stop=True) == ("abc", "bc")


def test_stop_text_withholds_possible_start_of_stop_string() -> None:
    text = StopText(["END"], include_stop=False)
    assert text.feed("a E") == "a "
    assert text.feed("N") == ""
    assert text.feed("x") == "ENx"


def test_stop_text_ignores_stop_string_before_minimum() -> None:
    text = StopText(["b"], include_stop=False)
    assert text.feed("ab", may_stop=False) == "ab"
    assert not text.matched_stop


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1)))
def test_stop_text_matches_regardless_of_pieces(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    out, matched = feed_pieces(pieces, stops)
    if matched:
        assert whole.startswith(out + matched)
        assert not any(stop in out for stop in stops)
    else:
        assert out == whole
        assert not any(stop in whole for stop in stops)


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1)),
    st.integers(0, 12),
    st.integers(0, 3),
    st.booleans(),
)
def test_stop_text_continues_after_prior_pieces(
    pieces: list[str], stops: list[str], place: int, withheld: int, include_stop: bool
) -> None:
    """Also if the earlier engine has withheld more of the text, or less."""
    whole, matched = feed_pieces(pieces, stops, include_stop=include_stop)
    text = StopText(stops, include_stop=include_stop)
    sent_chars = max(0, len(feed_pieces(pieces[:place], stops, include_stop=include_stop)[0]))
    sent_chars = max(0, sent_chars - withheld)
    text.take_prior(pieces[:place], min_tokens=0, sent_chars=sent_chars)
    rest = ""
    for piece in pieces[place:]:
        if text.matched_stop:
            break
        rest += text.feed(piece)
    assert (rest + text.flush(), text.matched_stop) == (whole[sent_chars:], matched)


@pytest.mark.parametrize(
    ("text", "stop", "include", "expected"),
    [
        (" river", (), False, " river"),
        (" river", ("river bank",), False, " "),
        (" river", ("river bank",), True, " river"),
        (" river", ("erosion", "xyz"), False, " riv"),
    ],
)
def test_certain_text_withholds_possible_start_of_stop_string(
    text: str, stop: tuple[str, ...], include: bool, expected: str
) -> None:
    sampling = Sampling(max_tokens=8, stop=stop, include_stop=include)
    assert certain_text(text, sampling) == expected

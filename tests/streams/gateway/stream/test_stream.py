"""Slicing: whatever the log repeats, reorders or restarts, the text has no gap and no repeat."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from schemas.records import OutcomeKind
from streams.gateway.stream.stream import EARLY_ROWS_MAX, Stream
from tests.streams.gateway.samples import ended

ANSWER = ["", "Hé", "", "llo", ",", " ", "wör", "ld", "", "", "!", " and", " on"]
IDS = list(range(500, 500 + len(ANSWER)))


@dataclass(frozen=True)
class Piece:
    """A row of one attempt; its last one carries the end."""

    attempt: int
    first: int
    last: int

    def push(self, stream: Stream) -> int:
        before = "".join(ANSWER[: self.first])
        return stream.push(
            self.attempt,
            self.first,
            len(before),
            self.last - self.first,
            "".join(ANSWER[self.first : self.last]),
            tuple(IDS[self.first : self.last]),
        )


def said(stream: Stream, attempt: int, first: int, text: str) -> int:
    """Push a row with a token for each character."""
    return stream.push(attempt, first, first, len(text), text, tuple(map(ord, text)))


def cut(attempt: int, cuts: set[int], upto: int = len(ANSWER)) -> list[Piece]:
    edges = sorted({0, upto, *(c for c in cuts if c < upto)})
    return [Piece(attempt, a, b) for a, b in zip(edges, edges[1:], strict=False)]


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[Piece], list[Piece]]:
    """Rows in the order of delivery: attempts that were given up, then one that is whole."""
    edges = st.sets(st.integers(1, len(ANSWER) - 1))
    rows: list[Piece] = []
    attempts = draw(st.integers(1, 3))
    for attempt in range(1, attempts):
        upto = draw(st.integers(1, len(ANSWER)))
        rows += cut(attempt, draw(edges), upto)
    last = cut(attempts, draw(edges))
    repeats = draw(st.lists(st.sampled_from(rows + last)))
    merged = draw(st.lists(st.tuples(st.sampled_from(last), st.sampled_from(last))))
    wide = [Piece(attempts, min(a.first, b.first), max(a.last, b.last)) for a, b in merged]
    return draw(st.permutations(rows + last + repeats + wide)), last


@given(deliveries())
def test_any_interleaving_gives_the_answer_without_gap_or_repeat(
    delivery: tuple[list[Piece], list[Piece]],
) -> None:
    rows, last = delivery
    stream = Stream("r1")
    text = ""
    new = 0
    for row in rows:
        new += row.push(stream)
        text += stream.drain()
        assert "".join(ANSWER).startswith(text)
        assert stream.next_char == len(text)
        assert stream.next_seq == len(stream.token_ids) == new
    assert text == "".join(ANSWER)
    assert stream.token_ids == IDS
    assert stream.finish(ended("r1", ANSWER, attempt=last[0].attempt))


@given(deliveries(), st.integers(0, 60), st.booleans())
def test_the_end_waits_for_what_is_missing(
    delivery: tuple[list[Piece], list[Piece]], at: int, counts: bool
) -> None:
    rows, last = delivery
    stream = Stream("r1")
    end = ended("r1", ANSWER, attempt=last[0].attempt)
    for i, row in enumerate([*rows, *last]):
        if i == at:
            stream.finish(end)
        row.push(stream)
    stream.finish(end)
    assert stream.end is end
    assert stream.drain() == "".join(ANSWER)


@given(deliveries(), st.integers(0, len(ANSWER)))
def test_a_resumed_stream_gives_exactly_the_rest(
    delivery: tuple[list[Piece], list[Piece]], has: int
) -> None:
    rows, _ = delivery
    client = Stream("r1")
    Piece(1, 0, has).push(client)
    client.drain()
    stream = Stream("r1", client_position=client.position())
    for row in rows:
        row.push(stream)
    assert stream.drain() == "".join(ANSWER[has:])
    assert stream.token_ids == IDS[has:]


def test_rows_of_a_lower_attempt_are_dropped() -> None:
    stream = Stream("r1")
    said(stream, 2, 0, "a")
    assert said(stream, 1, 1, "x") == 0
    assert said(stream, 2, 1, "b") == 1
    assert stream.drain() == "ab"
    assert stream.repeated_rows == 1


def test_a_higher_attempt_restarts_and_drops_what_waited() -> None:
    stream = Stream("r1")
    said(stream, 1, 0, "a")
    said(stream, 1, 5, "x")  # ahead; the attempt dies before the gap fills
    assert stream.has_gap
    said(stream, 2, 0, "abc")
    assert not stream.has_gap
    assert stream.drain() == "abc"


def test_an_end_of_zero_and_zero_means_what_is_there() -> None:
    stream = Stream("r1")
    said(stream, 1, 0, "ab")
    assert stream.finish(ended("r1"))


def test_an_end_that_is_no_answer_does_not_wait() -> None:
    stream = Stream("r1")
    said(stream, 1, 3, "x")
    assert stream.finish(ended("r1", ["a"] * 9, kind=OutcomeKind.FAILED))
    assert not stream.has_gap


def test_an_end_of_a_lower_attempt_is_dropped_and_of_a_higher_one_counts() -> None:
    stream = Stream("r1")
    said(stream, 2, 0, "a")
    assert not stream.finish(ended("r1", ["a"], attempt=1))
    assert stream.finish(ended("r1", ["a"], attempt=3))


def test_nothing_follows_the_end() -> None:
    stream = Stream("r1")
    said(stream, 1, 0, "a")
    stream.finish(ended("r1", ["a"]))
    assert said(stream, 2, 0, "abcdefghi") == 0
    assert not stream.finish(ended("r1", ["a"]))
    assert stream.drain() == "a"


def test_rows_that_wait_are_bounded() -> None:
    stream = Stream("r1")
    for seq in range(1, EARLY_ROWS_MAX + 10):
        said(stream, 1, seq, "x")
    said(stream, 1, 0, "x")
    assert stream.next_seq == EARLY_ROWS_MAX + 1

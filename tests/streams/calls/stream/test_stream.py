"""Slicing: whatever the log repeats, reorders or restarts, the text has no gap and no repeat."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import OutcomeKind
from schemas.rules.tokens import pack_tokens
from streams.calls.stream.event_id import ClientPosition
from streams.calls.stream.stream import EARLY_ROWS_MAX, Stream
from tests.streams.gateway.samples import stream_end

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


def push_text(stream: Stream, attempt: int, first: int, text: str) -> int:
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
def test_stream_yields_answer_without_gap_or_repeat(
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
    assert stream.finish(stream_end("r1", ANSWER, attempt=last[0].attempt))


@given(deliveries(), st.integers(0, 60), st.booleans())
def test_stream_end_waits_for_missing_rows(
    delivery: tuple[list[Piece], list[Piece]], at: int, counts: bool
) -> None:
    rows, last = delivery
    stream = Stream("r1")
    end = stream_end("r1", ANSWER, attempt=last[0].attempt)
    for i, row in enumerate([*rows, *last]):
        if i == at:
            stream.finish(end)
        row.push(stream)
    stream.finish(end)
    assert stream.end is end
    assert stream.drain() == "".join(ANSWER)


@given(deliveries(), st.integers(0, len(ANSWER)))
def test_resumed_stream_yields_exact_rest(
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


def test_stream_drops_rows_of_lower_attempt() -> None:
    stream = Stream("r1")
    push_text(stream, 2, 0, "a")
    assert push_text(stream, 1, 1, "x") == 0
    assert push_text(stream, 2, 1, "b") == 1
    assert stream.drain() == "ab"
    assert stream.repeated_rows == 1


def test_higher_attempt_discards_early_rows_of_lower_one() -> None:
    stream = Stream("r1")
    push_text(stream, 1, 0, "a")
    push_text(stream, 1, 5, "x")  # ahead; the attempt dies before the gap fills
    assert stream.has_gap
    push_text(stream, 2, 0, "abc")
    assert not stream.has_gap
    assert stream.drain() == "abc"


def test_stream_end_without_counts_means_received_rows() -> None:
    stream = Stream("r1")
    push_text(stream, 1, 0, "ab")
    assert stream.finish(stream_end("r1"))


def test_failed_end_waits_for_no_rows() -> None:
    stream = Stream("r1")
    push_text(stream, 1, 3, "x")
    assert stream.finish(stream_end("r1", ["a"] * 9, kind=OutcomeKind.FAILED))
    assert not stream.has_gap


def test_stream_ignores_end_of_lower_attempt() -> None:
    stream = Stream("r1")
    push_text(stream, 2, 0, "a")
    assert not stream.finish(stream_end("r1", ["a"], attempt=1))
    assert stream.finish(stream_end("r1", ["a"], attempt=3))


def test_stream_ignores_rows_after_end() -> None:
    stream = Stream("r1")
    push_text(stream, 1, 0, "a")
    stream.finish(stream_end("r1", ["a"]))
    assert push_text(stream, 2, 0, "abcdefghi") == 0
    assert not stream.finish(stream_end("r1", ["a"]))
    assert stream.drain() == "a"


def test_stream_bounds_early_rows() -> None:
    stream = Stream("r1")
    for seq in range(1, EARLY_ROWS_MAX + 10):
        push_text(stream, 1, seq, "x")
    push_text(stream, 1, 0, "x")
    assert stream.next_seq == EARLY_ROWS_MAX + 1


# Attempts that were given up


def test_stream_ignores_rows_of_voided_attempt() -> None:
    stream = Stream("r1")
    push_text(stream, 1, 0, "abc")
    assert stream.void(1) and stream.progress() == (pack_tokens([*map(ord, "abc")]), 3)
    assert push_text(stream, 1, 3, "xyz") == 0 and not stream.has_gap
    assert stream.drain() == "abc"
    assert push_text(stream, 2, 3, "def") == 3  # where the first stopped
    assert stream.drain() == "def" and stream.differs_at is None
    assert stream.finish(stream_end("r1", list("abcdef"), attempt=2))


@given(deliveries(), st.integers(0, 40))
def test_streams_agree_on_progress_at_void_mark(
    delivery: tuple[list[Piece], list[Piece]], at: int
) -> None:
    rows, last = delivery
    attempt = last[0].attempt
    has = ClientPosition(2, 3, False, 0)  # of a client that resumes, whatever it has
    first, second = Stream("r1"), Stream("r1", client_position=has, tolerates_difference=True)
    for row in rows[:at]:
        row.push(first)
        row.push(second)
    assert first.void(attempt) and second.void(attempt)
    tokens, chars = first.progress()
    assert (tokens, chars) == second.progress()
    assert tokens == pack_tokens(IDS[: len(tokens) // 4])
    assert "".join(ANSWER).startswith("".join(first.texts)) and chars == len("".join(first.texts))
    for row in rows[at:]:
        row.push(first)
    assert first.progress() == (tokens, chars)


def test_voided_attempt_counts_when_complete() -> None:
    """Its router has read the outcome before it placed the request again."""
    stream = Stream("r1")
    push_text(stream, 1, 0, "ab")
    stream.void(1)
    push_text(stream, 1, 2, "cd")
    assert stream.finish(stream_end("r1", list("abcd")))
    assert stream.drain() == "abcd"


def test_error_of_voided_attempt_adds_no_late_rows() -> None:
    """Otherwise readers would end with different texts, as they had read at the mark."""
    stream = Stream("r1")
    push_text(stream, 1, 0, "ab")
    stream.void(1)
    push_text(stream, 1, 2, "cd")
    assert stream.finish(stream_end("r1", list("abcd"), kind=OutcomeKind.FAILED))
    assert stream.drain() == "ab" and stream.next_seq == 2


def test_late_rows_of_earlier_attempt_stay_out_of_next_one() -> None:
    """The next attempt continued from what readers had; late rows would be other tokens."""
    stream = Stream("r1")
    push_text(stream, 1, 0, "ab")
    stream.void(1)
    push_text(stream, 1, 2, "xy")
    stream.void(2)
    push_text(stream, 2, 2, "cd")
    assert stream.finish(stream_end("r1", list("abcd"), attempt=2)) and not stream.broken
    assert stream.drain() == "abcd"


def test_void_mark_discards_early_rows() -> None:
    stream = Stream("r1")
    push_text(stream, 1, 0, "a")
    push_text(stream, 1, 3, "x")
    assert stream.has_gap and stream.void(1)
    assert not stream.has_gap and stream.progress()[1] == 1


def test_stream_ignores_void_mark_of_past_or_finished_attempt() -> None:
    stream = Stream("r1")
    push_text(stream, 2, 0, "a")
    assert not stream.void(1)
    push_text(stream, 2, 1, "b")
    assert stream.drain() == "ab"
    assert stream.finish(stream_end("r1", list("ab"), attempt=2)) and not stream.void(2)


def test_attempt_without_rows_can_be_voided() -> None:
    stream = Stream("r1")
    assert stream.void(1) and stream.progress() == (b"", 0)
    assert push_text(stream, 1, 0, "xy") == 0
    assert push_text(stream, 2, 0, "ab") == 2 and stream.drain() == "ab"


def test_late_rows_do_not_restart_stream() -> None:
    stream = Stream("r1", restarts=True)
    push_text(stream, 1, 0, "abc")
    stream.void(1)
    stream.void(2)
    push_text(stream, 2, 0, "xyz")
    assert stream.progress()[1] == 3
    push_text(stream, 3, 3, "d")
    assert stream.drain() == "abcd"


@pytest.mark.parametrize("restarts", [False, True])
def test_attempt_without_new_tokens_ends_stream(restarts: bool) -> None:
    """The previous attempt had sampled the end of the answer, and could not report it."""
    stream = Stream("r1", restarts=restarts)
    push_text(stream, 1, 0, "abc")
    stream.void(1)
    assert stream.finish(stream_end("r1", list("abc"), attempt=2))
    assert stream.drain() == "abc"


@pytest.mark.parametrize("second", ["", "a", "ab", "aX", "abcd"])
def test_restarting_stream_has_progress_of_plain_one(second: str) -> None:
    """Otherwise they would report different progress, and one of them would lack tokens."""
    streams = [Stream("r1"), Stream("r1", restarts=True)]
    has = "abc" if "abc".startswith(second) else second
    for stream in streams:
        push_text(stream, 1, 0, "abc")
        stream.void(1)
        push_text(stream, 2, 0, second)  # anew: nobody had told in time
        stream.void(2)
    whole, restarted = streams
    assert whole.broken or whole.progress() == restarted.progress()
    assert restarted.progress() == (pack_tokens([*map(ord, has)]), len(has))
    push_text(restarted, 3, len(has), "e")
    assert restarted.finish(stream_end("r1", has + "e", attempt=3)) and not restarted.broken
    assert (restarted.drain(), restarted.token_ids) == (has + "e", [*map(ord, has + "e")])


def test_restarting_stream_ends_with_its_attempt() -> None:
    stream = Stream("r1", restarts=True)
    push_text(stream, 1, 0, "abcd")
    stream.void(1)
    push_text(stream, 2, 0, "a")
    stream.void(2)
    push_text(stream, 2, 1, "b")
    assert stream.finish(stream_end("r1", "ab", attempt=2))  # late, and whole all the same
    assert (stream.drain(), stream.broken) == ("ab", False)


def test_restarting_stream_continues_where_higher_attempt_does() -> None:
    """It restarts from the beginning only where that attempt does."""
    stream = Stream("r1", restarts=True)
    push_text(stream, 1, 0, "abc")
    stream.void(1)
    push_text(stream, 2, 3, "d")
    assert stream.drain() == "abcd"
    stream.void(2)
    push_text(stream, 3, 0, "xyz")
    assert (stream.next_seq, stream.differs_at) == (3, None)

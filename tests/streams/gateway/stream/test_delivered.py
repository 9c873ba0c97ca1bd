"""Attempts that generate other tokens than those that were delivered are never spliced silently."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import AttemptsDiffer
from schemas.records import OutcomeKind, TokenFrame
from schemas.rules.tokens import pack_tokens
from streams.gateway.stream.stream import Stream
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat, ended, events_of, frame, text_of
from tests.streams.gateway.stream.test_stream import ANSWER, Piece, deliveries, said
from tests.streams.gateway.streamed_call import accepted_requests, streamed_call, whole_stream
from tests.waiting import until

TEXTS = ["The", " answer", " is", " 41"]


def other(one: TokenFrame, at: int) -> TokenFrame:
    """The frame with another token there."""
    ids = list(one.token_ids)
    ids[at] += 1
    return replace(one, token_ids=ids)


async def test_a_stream_whose_next_attempt_differs_ends_with_an_error() -> None:
    """And what runs of it is cancelled."""
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:3]))
        await until(lambda: len(stream.writes) == 1)
        end = ended(request.request_id, TEXTS, attempt=2)
        await gateway.log.push(other(frame(request.request_id, TEXTS, attempt=2, end=end), 1))
        await until(lambda: stream.over)
        await gateway.log.wait_sent(2)
    events = events_of(stream.text)
    assert text_of(events) == "The answer is"
    assert events[-1]["error"]["code"] == AttemptsDiffer.code
    assert "from token 1 on; send the request again" in events[-1]["error"]["message"]
    assert [c.request_id for c in gateway.log.cancellations] == [request.request_id]
    assert b"trivium_gateway_differing_streams_total 1.0" in gateway.state.metrics.render()


async def test_a_gateway_told_to_mark_goes_on_and_says_so() -> None:
    gateway = InProcessGateway(on_difference="mark")
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:3]))
        end = ended(request.request_id, TEXTS, attempt=2)
        await gateway.log.push(other(frame(request.request_id, TEXTS, attempt=2, end=end), 1))
        await until(lambda: stream.over)
    events = events_of(stream.text)
    assert text_of(events) == "".join(TEXTS)
    assert events[-2]["trivium"]["differs_at"] == 1


async def test_a_whole_answer_is_that_of_the_last_attempt() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat()) as stream:
        (request,) = await accepted_requests(gateway)
        end = ended(request.request_id, TEXTS, attempt=2)
        await gateway.log.push(
            other(frame(request.request_id, ["What"]), 0),
            frame(request.request_id, TEXTS, attempt=2, end=end),
        )
        await until(lambda: stream.over)
    assert stream.status == 200
    assert '"content":"The answer is 41"' in stream.text
    assert "differs_at" not in stream.text


@pytest.mark.parametrize("seen", [0, 1])
async def test_another_gateway_refuses_to_go_on_behind_other_tokens(seen: int) -> None:
    """What the client has is not what this log says."""
    first = InProcessGateway()
    stream = await whole_stream(first, chat(stream=True), TEXTS)
    second = InProcessGateway(partition=1)
    second.log.frames = [other(one, 0) for one in first.log.frames]
    async with second.client() as client:
        path = f"/v1/requests/{stream.headers['x-request-id']}/events"
        response = await client.get(path, headers={"Last-Event-ID": stream.ids[1 + seen]})
    assert response.status_code == AttemptsDiffer.http_status
    assert response.json()["error"]["code"] == AttemptsDiffer.code


def test_what_another_attempt_repeats_otherwise_breaks_the_stream() -> None:
    """Nothing of it follows what was delivered, not even what both have."""
    stream = Stream("r1")
    said(stream, 1, 0, "41 bec")
    assert stream.drain() == "41 bec"
    assert said(stream, 2, 0, "41 *7.") == 0
    assert said(stream, 2, 6, "!") == 0
    assert not stream.finish(ended("r1", "41 *7.!", attempt=2))
    assert (stream.drain(), stream.differs_at, stream.broken) == ("", 3, True)


def test_text_that_differs_under_equal_tokens_breaks_the_stream_as_well() -> None:
    stream = Stream("r1")
    stream.push(1, 0, 0, 2, "ab", (1, 2))
    stream.push(2, 0, 0, 3, "abc", (1, 2, 3))
    assert stream.drain() == "abc"
    stream.push(3, 0, 0, 2, "aB", (1, 2))
    assert (stream.broken, stream.differs_at) == (True, 0)


def test_an_attempt_that_ends_where_another_went_on_breaks_the_stream() -> None:
    stream = Stream("r1")
    said(stream, 1, 0, "abcd")
    said(stream, 2, 0, "ab")
    assert not stream.finish(ended("r1", "ab", attempt=2))
    assert (stream.broken, stream.differs_at) == (True, 2)


def test_a_stream_that_goes_on_tells_where_it_differs() -> None:
    stream = Stream("r1", tolerates_difference=True)
    said(stream, 1, 0, "abcd")
    said(stream, 2, 0, "abXY")
    said(stream, 2, 4, "Z")
    assert (stream.drain(), stream.differs_at, stream.broken) == ("abcdZ", 2, False)


def test_what_nobody_has_read_starts_again_with_another_attempt() -> None:
    """A whole answer is of one attempt, whatever earlier ones said."""
    stream = Stream("r1", restarts=True)
    said(stream, 1, 0, "abcd")
    said(stream, 2, 0, "aX")
    assert stream.finish(ended("r1", "aX", attempt=2))
    assert (stream.drain(), stream.token_ids) == ("aX", [97, 88])
    assert stream.differs_at is None


@pytest.mark.parametrize("tolerates", [False, True])
def test_a_first_token_that_decode_draws_otherwise_is_a_difference_like_any(
    tolerates: bool,
) -> None:
    """What follows belongs to decode's own first token."""
    stream = Stream("r1", tolerates_difference=tolerates)
    said(stream, 1, 0, "a")
    said(stream, 1, 0, "Xbc")
    assert (stream.differs_at, stream.broken) == (0, not tolerates)
    assert stream.drain() == ("abc" if tolerates else "a")


def test_a_whole_answer_is_decodes_where_its_first_token_is_another_one() -> None:
    """Nobody has read prefill's."""
    stream = Stream("r1", restarts=True)
    said(stream, 1, 0, "a")
    said(stream, 1, 0, "Xbc")
    assert stream.finish(ended("r1", "Xbc"))
    assert (stream.drain(), stream.token_ids) == ("Xbc", [88, 98, 99])
    assert (stream.differs_at, stream.broken) == (None, False)


@pytest.mark.parametrize("begins", [0, 3])
@pytest.mark.parametrize("decoded", ["X", "Xb", "Xbc"])
def test_so_it_is_wherever_an_attempt_goes_on_and_however_short_it_is(
    begins: int, decoded: str
) -> None:
    """A near tie fails no call of which nothing was shown."""
    stream = Stream("r1", restarts=True)
    said(stream, 1, 0, "abc"[:begins])
    assert stream.void(1)
    said(stream, 2, begins, "d")
    said(stream, 2, begins, decoded)
    whole = "abc"[:begins] + decoded
    assert stream.progress() == (pack_tokens([*map(ord, whole)]), len(whole))
    assert stream.finish(ended("r1", whole, attempt=2)) and not stream.broken
    assert (stream.drain(), stream.token_ids) == (whole, [*map(ord, whole)])
    assert stream.differs_at is None


def test_what_waits_behind_a_token_that_is_taken_back_waits_on() -> None:
    stream = Stream("r1", restarts=True)
    said(stream, 1, 0, "a")
    assert stream.void(1)
    said(stream, 2, 3, "de")
    said(stream, 2, 1, "bc")
    assert stream.finish(ended("r1", "abcde", attempt=2))
    assert stream.drain() == "abcde"


@given(deliveries(), st.integers(1, len(ANSWER)), st.booleans())
def test_a_resume_after_something_else_than_the_log_has_is_noticed(
    delivery: tuple[list[Piece], list[Piece]], chars: int, tolerates: bool
) -> None:
    """The digest in the event id says what its client has."""
    rows, last = delivery
    client = Stream("r1")
    Piece(1, 0, chars).push(client)
    client.drain()
    other = client.position()._replace(digest=client.position().digest ^ 1)
    stream = Stream("r1", client_position=other, tolerates_difference=tolerates)
    for row in rows:
        row.push(stream)
        assert not stream.is_catching_up or not stream.drain()
    stream.finish(ended("r1", ANSWER, attempt=last[0].attempt))
    assert stream.differs_at == 0
    assert stream.broken is not tolerates
    assert stream.drain() == ("".join(ANSWER[chars:]) if tolerates else "")


def test_a_resume_beyond_the_end_is_noticed() -> None:
    client = Stream("r1")
    said(client, 1, 0, "abc")
    client.drain()
    stream = Stream("r1", client_position=client.position())
    said(stream, 1, 0, "ab")
    assert not stream.finish(ended("r1", "ab"))
    assert (stream.drain(), stream.broken) == ("", True)


def test_an_error_ends_a_stream_that_is_behind() -> None:
    client = Stream("r1")
    said(client, 1, 0, "abc")
    client.drain()
    stream = Stream("r1", client_position=client.position())
    said(stream, 1, 0, "ab")
    assert stream.finish(ended("r1", "ab", kind=OutcomeKind.FAILED))
    assert stream.drain() == ""

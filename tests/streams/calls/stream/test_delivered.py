"""Attempts that generate other tokens than those that were delivered are never spliced silently."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import AttemptsDiffer
from schemas.records import OutcomeKind, TokenFrame
from schemas.rules.tokens import pack_tokens
from streams.calls.stream.stream import Stream
from tests.streams.calls.stream.test_stream import ANSWER, Piece, deliveries, push_text
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat, events_of, frame, stream_end, text_of
from tests.streams.gateway.streamed_call import accepted_requests, streamed_call, whole_stream
from tests.waits import until

TEXTS = ["The", " answer", " is", " 41"]


def alter_token(token_frame: TokenFrame, at: int) -> TokenFrame:
    """The frame with another token there."""
    ids = list(token_frame.token_ids)
    ids[at] += 1
    return replace(token_frame, token_ids=ids)


async def test_stream_fails_when_next_attempt_differs() -> None:
    """The gateway cancels the attempt that still runs."""
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:3]))
        await until(lambda: len(stream.writes) == 1)
        end = stream_end(request.request_id, TEXTS, attempt=2)
        await gateway.log.push(alter_token(frame(request.request_id, TEXTS, attempt=2, end=end), 1))
        await until(lambda: stream.over)
        await gateway.log.wait_sent(2)
    events = events_of(stream.text)
    assert text_of(events) == "The answer is"
    assert events[-1]["error"]["code"] == AttemptsDiffer.code
    assert "from token 1 on; send the request again" in events[-1]["error"]["message"]
    assert [c.request_id for c in gateway.log.cancellations] == [request.request_id]
    assert b"trivium_gateway_differing_streams_total 1.0" in gateway.state.metrics.render()


async def test_stream_marks_difference_when_configured() -> None:
    gateway = InProcessGateway(on_difference="mark")
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:3]))
        end = stream_end(request.request_id, TEXTS, attempt=2)
        await gateway.log.push(alter_token(frame(request.request_id, TEXTS, attempt=2, end=end), 1))
        await until(lambda: stream.over)
    events = events_of(stream.text)
    assert text_of(events) == "".join(TEXTS)
    assert events[-2]["trivium"]["differs_at"] == 1


async def test_whole_answer_takes_last_attempt() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat()) as stream:
        (request,) = await accepted_requests(gateway)
        end = stream_end(request.request_id, TEXTS, attempt=2)
        await gateway.log.push(
            alter_token(frame(request.request_id, ["What"]), 0),
            frame(request.request_id, TEXTS, attempt=2, end=end),
        )
        await until(lambda: stream.over)
    assert stream.status == 200
    assert '"content":"The answer is 41"' in stream.text
    assert "differs_at" not in stream.text


@pytest.mark.parametrize("event_index", [0, 1])
async def test_second_gateway_rejects_resume_after_different_tokens(event_index: int) -> None:
    """The client has other tokens than this log."""
    first = InProcessGateway()
    stream = await whole_stream(first, chat(stream=True), TEXTS)
    second = InProcessGateway(partition=1)
    second.log.frames = [alter_token(token_frame, 0) for token_frame in first.log.frames]
    async with second.client() as client:
        path = f"/v1/requests/{stream.headers['x-request-id']}/events"
        response = await client.get(path, headers={"Last-Event-ID": stream.ids[1 + event_index]})
    assert response.status_code == AttemptsDiffer.http_status
    assert response.json()["error"]["code"] == AttemptsDiffer.code


def test_stream_breaks_when_attempt_repeats_other_tokens() -> None:
    """No token of that attempt follows, not even those that both have."""
    stream = Stream("r1")
    push_text(stream, 1, 0, "41 bec")
    assert stream.drain() == "41 bec"
    assert push_text(stream, 2, 0, "41 *7.") == 0
    assert push_text(stream, 2, 6, "!") == 0
    assert not stream.finish(stream_end("r1", "41 *7.!", attempt=2))
    assert (stream.drain(), stream.differs_at, stream.broken) == ("", 3, True)


def test_stream_breaks_when_text_differs_for_equal_tokens() -> None:
    stream = Stream("r1")
    stream.push(1, 0, 0, 2, "ab", (1, 2))
    stream.push(2, 0, 0, 3, "abc", (1, 2, 3))
    assert stream.drain() == "abc"
    stream.push(3, 0, 0, 2, "aB", (1, 2))
    assert (stream.broken, stream.differs_at) == (True, 0)


def test_stream_breaks_when_attempt_ends_before_delivered_tokens() -> None:
    stream = Stream("r1")
    push_text(stream, 1, 0, "abcd")
    push_text(stream, 2, 0, "ab")
    assert not stream.finish(stream_end("r1", "ab", attempt=2))
    assert (stream.broken, stream.differs_at) == (True, 2)


def test_tolerant_stream_reports_position_of_difference() -> None:
    stream = Stream("r1", tolerates_difference=True)
    push_text(stream, 1, 0, "abcd")
    push_text(stream, 2, 0, "abXY")
    push_text(stream, 2, 4, "Z")
    assert (stream.drain(), stream.differs_at, stream.broken) == ("abcdZ", 2, False)


def test_unread_stream_restarts_with_next_attempt() -> None:
    """A whole answer is of one attempt, whatever earlier ones generated."""
    stream = Stream("r1", restarts=True)
    push_text(stream, 1, 0, "abcd")
    push_text(stream, 2, 0, "aX")
    assert stream.finish(stream_end("r1", "aX", attempt=2))
    assert (stream.drain(), stream.token_ids) == ("aX", [97, 88])
    assert stream.differs_at is None


@pytest.mark.parametrize("tolerates", [False, True])
def test_stream_notices_different_first_token_of_decode(
    tolerates: bool,
) -> None:
    """The tokens that follow belong to the first token of the decode worker."""
    stream = Stream("r1", tolerates_difference=tolerates)
    push_text(stream, 1, 0, "a")
    push_text(stream, 1, 0, "Xbc")
    assert (stream.differs_at, stream.broken) == (0, not tolerates)
    assert stream.drain() == ("abc" if tolerates else "a")


def test_whole_answer_takes_first_token_of_decode() -> None:
    """Nobody has read the token of the prefill worker."""
    stream = Stream("r1", restarts=True)
    push_text(stream, 1, 0, "a")
    push_text(stream, 1, 0, "Xbc")
    assert stream.finish(stream_end("r1", "Xbc"))
    assert (stream.drain(), stream.token_ids) == ("Xbc", [88, 98, 99])
    assert (stream.differs_at, stream.broken) == (None, False)


@pytest.mark.parametrize("begins", [0, 3])
@pytest.mark.parametrize("decoded", ["X", "Xb", "Xbc"])
def test_whole_answer_takes_first_token_of_decode_at_any_position(
    begins: int, decoded: str
) -> None:
    """A near tie between two tokens fails no answer that nobody has read."""
    stream = Stream("r1", restarts=True)
    push_text(stream, 1, 0, "abc"[:begins])
    assert stream.void(1)
    push_text(stream, 2, begins, "d")
    push_text(stream, 2, begins, decoded)
    whole = "abc"[:begins] + decoded
    assert stream.progress() == (pack_tokens([*map(ord, whole)]), len(whole))
    assert stream.finish(stream_end("r1", whole, attempt=2)) and not stream.broken
    assert (stream.drain(), stream.token_ids) == (whole, [*map(ord, whole)])
    assert stream.differs_at is None


def test_early_rows_stay_queued_when_first_token_is_replaced() -> None:
    stream = Stream("r1", restarts=True)
    push_text(stream, 1, 0, "a")
    assert stream.void(1)
    push_text(stream, 2, 3, "de")
    push_text(stream, 2, 1, "bc")
    assert stream.finish(stream_end("r1", "abcde", attempt=2))
    assert stream.drain() == "abcde"


@given(deliveries(), st.integers(1, len(ANSWER)), st.booleans())
def test_stream_notices_resume_position_with_wrong_digest(
    delivery: tuple[list[Piece], list[Piece]], chars: int, tolerates: bool
) -> None:
    """The digest in the event id stands for what its client has."""
    rows, last = delivery
    client = Stream("r1")
    Piece(1, 0, chars).push(client)
    client.drain()
    forged_position = client.position()._replace(digest=client.position().digest ^ 1)
    stream = Stream("r1", client_position=forged_position, tolerates_difference=tolerates)
    for row in rows:
        row.push(stream)
        assert not stream.is_catching_up or not stream.drain()
    stream.finish(stream_end("r1", ANSWER, attempt=last[0].attempt))
    assert stream.differs_at == 0
    assert stream.broken is not tolerates
    assert stream.drain() == ("".join(ANSWER[chars:]) if tolerates else "")


def test_stream_breaks_on_resume_beyond_end() -> None:
    client = Stream("r1")
    push_text(client, 1, 0, "abc")
    client.drain()
    stream = Stream("r1", client_position=client.position())
    push_text(stream, 1, 0, "ab")
    assert not stream.finish(stream_end("r1", "ab"))
    assert (stream.drain(), stream.broken) == ("", True)


def test_error_ends_stream_behind_resume_position() -> None:
    client = Stream("r1")
    push_text(client, 1, 0, "abc")
    client.drain()
    stream = Stream("r1", client_position=client.position())
    push_text(stream, 1, 0, "ab")
    assert stream.finish(stream_end("r1", "ab", kind=OutcomeKind.FAILED))
    assert stream.drain() == ""

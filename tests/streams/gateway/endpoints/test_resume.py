"""Streams that are resumed, at any gateway, after any event."""

from collections.abc import Awaitable, Callable

import pytest

from schemas.errors import BrokerUnavailable
from streams.calls import in_flight
from tests.streams.gateway.in_process import STARTED_MS, InProcessGateway
from tests.streams.gateway.samples import chat, events_of, frame, stream_end, text_of
from tests.streams.gateway.streamed_call import (
    TEXTS,
    WITH_IDS,
    accepted_requests,
    streamed_call,
    whole_stream,
)
from tests.waits import until

Resume = Callable[[InProcessGateway, str, str], Awaitable[str]]


async def by_get(gateway: InProcessGateway, request_id: str, event_id: str) -> str:
    async with gateway.client() as client:
        path = f"/v1/requests/{request_id}/events"
        response = await client.get(path, headers={"Last-Event-ID": event_id})
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"] == request_id
    assert response.headers["x-session-id"] == "mine"
    return response.text


async def by_post(gateway: InProcessGateway, request_id: str, event_id: str) -> str:
    async with gateway.client() as client:
        headers = {"Last-Event-ID": event_id}
        response = await client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.parametrize("resume", [by_get, by_post])
async def test_second_gateway_resumes_stream_after_any_event(resume: Resume) -> None:
    first = InProcessGateway()
    await first.log.push(frame("r-of-somebody-else", ["x"]))
    options = {"include_usage": True}
    stream = await whole_stream(first, chat(stream=True, stream_options=options), TEXTS)
    second = InProcessGateway(partition=1)
    second.log.frames = first.log.frames
    request_id = stream.headers["x-request-id"]
    whole = events_of(stream.text)
    assert len(stream.ids) == len(whole) - 1 == len(TEXTS) + 3
    for i, event_id in enumerate(stream.ids):
        rest = events_of(await resume(second, request_id, event_id))
        had = text_of(whole[: i + 1])
        assert had + text_of(rest) == "".join(TEXTS)
        assert rest[-2]["usage"] == whole[-2]["usage"]
        assert rest[-1] == "[DONE]"
    assert second.log.sent_records == second.log.resumptions
    assert not second.state.calls.resumed


async def test_resume_continues_each_choice_at_its_position() -> None:
    first = InProcessGateway()
    stream = await whole_stream(first, chat(stream=True, n=2), TEXTS)
    second = InProcessGateway()
    second.log.frames = first.log.frames
    events = events_of(stream.text)
    assert len(stream.ids) == len(events) - 1
    for i, event_id in enumerate(stream.ids):
        rest = events_of(await by_get(second, stream.headers["x-request-id"], event_id))
        for index in (0, 1):
            spelled = "".join(
                choice["delta"].get("content") or ""
                for event in [*events[: i + 1], *rest]
                if isinstance(event, dict)
                for choice in event["choices"]
                if choice["index"] == index
            )
            assert spelled == "".join(TEXTS)


async def test_resumed_stream_follows_live_and_disconnect_cancels_nothing() -> None:
    first, second = InProcessGateway(), InProcessGateway()
    second.log.frames, second.log.news = first.log.frames, first.log.news
    async with streamed_call(first, chat(stream=True), **WITH_IDS) as stream:
        (request,) = await accepted_requests(first)
        await first.log.push(frame(request.request_id, TEXTS[:2]))
        await until(lambda: len(stream.writes) == 1)
        path = f"/v1/requests/{request.request_id}/events"
        resumed = streamed_call(second, path=path, Last_Event_ID=stream.ids[-1])
        leaving_call = streamed_call(second, path=path, Last_Event_ID=stream.ids[-1])
        async with resumed as follower, leaving_call as leaver:
            await until(lambda: len(second.state.calls.resumed) == 2)
            leaver.hang_up()
            await until(lambda: len(second.state.calls.resumed) == 1)
            end = stream_end(request.request_id, TEXTS)
            await first.log.push(
                frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5, end=end)
            )
            await until(lambda: follower.over)
    assert text_of(events_of(follower.text)) == " wörld"
    assert second.log.sent_records == second.log.resumptions


async def test_late_disconnect_after_resume_cancels_nothing() -> None:
    """The gateway notices a broken connection when the next one already reads the answer."""
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True), **WITH_IDS) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:2]))
        await until(lambda: len(stream.writes) == 1)
        path = f"/v1/requests/{request.request_id}/events"
        async with streamed_call(gateway, path=path, Last_Event_ID=stream.ids[-1]) as follower:
            await until(lambda: len(gateway.state.calls.resumed) == 1)
            stream.hang_up()
            await until(lambda: stream.over or bool(gateway.state.calls.detached))
            end = stream_end(request.request_id, TEXTS)
            await gateway.log.push(
                frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5, end=end)
            )
            await until(lambda: follower.over and not gateway.state.calls.in_flight)
    assert text_of(events_of(follower.text)) == " wörld"
    assert not gateway.log.cancellations


async def test_resume_without_event_id_restarts_at_own_gateway() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream, gateway.client() as client:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(
            frame(request.request_id, TEXTS[:2]),
        )
        await until(lambda: len(stream.writes) == 1)
        path = f"/v1/requests/{request.request_id}/events"
        async with streamed_call(gateway, path=path) as follower:
            await until(lambda: len(gateway.state.calls.resumed) == 1)  # before the call is over
            end = stream_end(request.request_id, TEXTS)
            await gateway.log.push(
                frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5, end=end)
            )
            await until(lambda: follower.over)
        assert text_of(events_of(follower.text)) == "".join(TEXTS)
        missing = await client.get("/v1/requests/r1/events")
        assert missing.status_code == 404
        mismatch = await client.get(
            "/v1/requests/r1/events", headers={"Last-Event-ID": follower.ids[0]}
        )
        assert mismatch.json()["error"]["message"].startswith("r1: the Last-Event-ID belongs to")


async def test_gateway_limits_resumed_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "RESUMES_MAX", 1)
    gateway = InProcessGateway()
    gateway.answer_with("a")
    async with gateway.client() as client:
        first_answer = await client.post(
            "/v1/chat/completions", json=chat(stream=True), headers=WITH_IDS
        )
        event_id = next(
            line[4:] for line in first_answer.text.splitlines() if line.startswith("id: ")
        )
        path = f"/v1/requests/{first_answer.headers['x-request-id']}/events"
        async with streamed_call(gateway, path=path, Last_Event_ID=event_id):
            await until(lambda: len(gateway.state.calls.resumed) == 1)
            refused = await client.get(path, headers={"Last-Event-ID": event_id})
    assert refused.status_code == 429


async def test_resuming_gateway_writes_resumption_to_routers() -> None:
    """It writes one for each choice, and only where another gateway accepted the call."""
    first, second = InProcessGateway(), InProcessGateway()
    second.log.frames, second.log.news = first.log.frames, first.log.news
    body = chat(stream=True, n=2)
    async with streamed_call(first, body, X_Session_Id="mine", **WITH_IDS) as stream:
        requests = await accepted_requests(first, 2)
        await first.log.push(*(frame(request.request_id, TEXTS[:1]) for request in requests))
        await until(lambda: bool(stream.ids))
        path = f"/v1/requests/{requests[0].parent_id}/events"
        async with (
            streamed_call(first, path=path, Last_Event_ID=stream.ids[-1]) as first_stream,
            streamed_call(second, path=path, Last_Event_ID=stream.ids[-1]) as second_stream,
        ):
            await second.log.wait_sent(2)
            for request in requests:
                end = stream_end(request.request_id, TEXTS[:1])
                await first.log.push(frame(request.request_id, [], end=end))
            await until(lambda: first_stream.over and second_stream.over)
    assert not first.log.resumptions
    assert second.log.sent_records == second.log.resumptions
    resumptions = [
        (resumption.request_id, resumption.session_id) for resumption in second.log.resumptions
    ]
    assert resumptions == [(request.request_id, "mine") for request in requests]
    gateways = {
        (resumption.gateway_id, resumption.gateway_started_ms)
        for resumption in second.log.resumptions
    }
    assert gateways == {("gateway-1", STARTED_MS)}


async def test_resuming_gateway_retries_resumption_until_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resumed stream continues meanwhile."""
    first, second = InProcessGateway(), InProcessGateway()
    second.log.frames, second.log.news = first.log.frames, first.log.news
    monkeypatch.setattr(in_flight, "RETRY_S", 0.0)
    async with streamed_call(first, chat(stream=True), **WITH_IDS) as stream:
        (request,) = await accepted_requests(first)
        await first.log.push(frame(request.request_id, TEXTS[:1]))
        await until(lambda: bool(stream.ids))
        second.log.trouble = BrokerUnavailable("away")
        path = f"/v1/requests/{request.request_id}/events"
        async with streamed_call(second, path=path, Last_Event_ID=stream.ids[-1]) as follower:
            await first.log.push(frame(request.request_id, TEXTS[1:2], first_seq=1, first_char=2))
            await until(lambda: bool(follower.writes))
            second.log.trouble = None
            await second.log.wait_sent(1)
            end = stream_end(request.request_id, TEXTS[:2])
            await first.log.push(frame(request.request_id, [], end=end))
            await until(lambda: follower.over)
    assert text_of(events_of(follower.text)) == TEXTS[1]
    assert [resumption.request_id for resumption in second.log.resumptions] == [request.request_id]

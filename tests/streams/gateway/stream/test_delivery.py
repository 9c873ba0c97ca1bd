"""Server-sent events: their form, hanging up, cancelling, resuming, and a log that is silent."""

from collections.abc import Awaitable, Callable

import orjson
import pytest

from schemas.records import CancelReason, OutcomeKind, Request, WireError
from tests.streams.gateway.in_process import InProcessGateway, http_client, serving
from tests.streams.gateway.samples import MODEL, chat, ended, events_of, frame, text_of
from tests.streams.gateway.streamed_call import (
    TEXTS,
    accepted_requests,
    streamed_call,
    whole_stream,
)
from tests.waiting import until


async def test_one_write_per_batch_of_frames() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        assert stream.status == 0  # nothing is sent before the first token
        await gateway.log.push(frame(request.request_id, TEXTS[:1]))
        await until(lambda: len(stream.writes) == 1)
        await gateway.log.push(
            frame(request.request_id, TEXTS[1:2], first_seq=1, first_char=2),
            frame(request.request_id, TEXTS[2:4], first_seq=2, first_char=5),
        )
        await until(lambda: len(stream.writes) == 2)
        assert len(events_of(stream.writes[1])) == 1
        end = ended(request.request_id, TEXTS)
        await gateway.log.push(
            frame(request.request_id, TEXTS[4:], first_seq=4, first_char=9, end=end)
        )
        await until(lambda: stream.over)
        assert len(stream.writes) == 3
    events = events_of(stream.text)
    assert text_of(events) == "".join(TEXTS)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[-1] == "[DONE]"
    finish = events[-2]
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish["trivium"]["decode_worker"] == "decode-1"
    assert finish["trivium"]["session_id"] == request.session_id
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-request-id"] == request.request_id
    assert gateway.state.in_flight == 0
    assert len(gateway.log.hub) == 0
    assert not gateway.log.cancellations


async def test_usage_comes_last_when_it_is_asked_for() -> None:
    gateway = InProcessGateway()
    gateway.answer_with(*TEXTS)
    async with gateway.client() as client:
        body = chat(stream=True, stream_options={"include_usage": True})
        events = events_of((await client.post("/v1/chat/completions", json=body)).text)
    assert [event["usage"] for event in events[:-2]] == [None, None]
    usage = events[-2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage["trivium"]["mode"] == "remote"


async def test_choices_are_merged_with_their_index_and_token_ids() -> None:
    gateway = InProcessGateway()
    body = {"model": MODEL, "prompt": "x", "n": 2, "stream": True, "return_token_ids": True}
    async with streamed_call(gateway, body, "/v1/completions") as stream:
        first, second = await accepted_requests(gateway, 2)
        await gateway.log.push(frame(second.request_id, ["b"]), frame(first.request_id, ["a"]))
        await gateway.log.push(frame(first.request_id, [], end=ended(first.request_id, ["a"])))
        await until(lambda: "stop" in stream.text)
        assert not stream.over
        await gateway.log.push(
            frame(second.request_id, ["c"], first_seq=1, first_char=1,
                  end=ended(second.request_id, ["b", "c"]))
        )  # fmt: skip
        await until(lambda: stream.over)
    texts, tokens = ["", ""], [[], []]  # type: tuple[list[str], list[list[int]]]
    for event in events_of(stream.text)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice.get("token_ids") or []
    assert texts == ["a", "bc"]
    assert tokens == [[100], [100, 101]]
    assert stream.text.endswith("data: [DONE]\n\n")


async def test_token_0_may_come_after_its_successors() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[1:], first_seq=1, first_char=2,
                                 end=ended(request.request_id, TEXTS)))  # fmt: skip
        await gateway.log.push(frame(request.request_id, TEXTS[:1]))
        await until(lambda: stream.over)
    assert text_of(events_of(stream.text)) == "".join(TEXTS)


async def test_a_higher_attempt_continues_the_stream() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:3]))
        await until(lambda: len(stream.writes) == 1)
        end = ended(request.request_id, TEXTS, attempt=2)
        await gateway.log.push(
            frame(request.request_id, TEXTS[:1], attempt=2),
            frame(request.request_id, TEXTS[3:4], first_seq=3, first_char=6),  # the lost worker
            frame(request.request_id, TEXTS[1:], attempt=2, first_seq=1, first_char=2, end=end),
        )
        await until(lambda: stream.over)
    assert text_of(events_of(stream.text)) == "".join(TEXTS)


async def test_a_stream_that_breaks_ends_with_an_error_and_without_done() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:1]))
        await until(lambda: len(stream.writes) == 1)
        error = WireError(code="worker_lost", message="decode-1 is silent")
        end = ended(request.request_id, kind=OutcomeKind.FAILED, error=error)
        await gateway.log.push(
            frame(request.request_id, TEXTS[1:2], first_seq=1, first_char=2, end=end)
        )
        await until(lambda: stream.over)
    events = events_of(stream.text)
    assert text_of(events) == "Héllo"
    assert events[-1]["error"]["code"] == "worker_lost"
    assert stream.status == 200


@pytest.mark.parametrize("stream_it", [True, False])
async def test_a_client_that_hangs_up_cancels_its_work(stream_it: bool) -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=stream_it, n=2)) as stream:
        first, second = await accepted_requests(gateway, 2)
        await gateway.log.push(frame(first.request_id, ["a"], end=ended(first.request_id, ["a"])))
        stream.hang_up()
        await gateway.log.wait_sent(3)
    (cancellation,) = gateway.log.cancellations  # the first choice had ended
    assert cancellation.request_id == second.request_id
    assert cancellation.session_id == second.session_id
    assert cancellation.reason is CancelReason.CLIENT_GONE
    assert gateway.state.in_flight == 0


@pytest.mark.parametrize("stream_it", [True, False])
async def test_a_client_may_hang_up_and_let_the_work_go_on(stream_it: bool) -> None:
    """What goes on without its client still counts, until it ends (issue 10, 18)."""
    gateway = InProcessGateway(in_flight_max=1)
    async with streamed_call(
        gateway, chat(stream=stream_it), X_Trivium_On_Disconnect="continue"
    ) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:1]))
        stream.hang_up()
        await until(lambda: gateway.state.detached == 1)
        await gateway.state.wait_until_idle(60_000)  # nobody has to wait for it
        async with gateway.client() as client:
            refused = await client.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 429
        end = ended(request.request_id, TEXTS[:2])
        await gateway.log.push(
            frame(request.request_id, TEXTS[1:2], first_seq=1, first_char=2, end=end)
        )
        await until(lambda: gateway.state.in_flight == 0)
    assert gateway.state.detached == 0
    assert not gateway.log.cancellations


async def test_work_that_goes_on_alone_ends_with_its_deadline() -> None:
    """Nobody hears of it, but it frees its place (issue 10, 18)."""
    gateway = InProcessGateway()
    async with streamed_call(
        gateway, chat(stream=True), X_Trivium_On_Disconnect="continue"
    ) as stream:
        (request,) = await accepted_requests(gateway)
        stream.hang_up()
        await until(lambda: gateway.state.detached == 1)
        gateway.state.sweep(0.0, request.deadline_ms + 2_001)
        await gateway.log.wait_sent(2)
    assert [c.request_id for c in gateway.log.cancellations] == [request.request_id]
    assert (gateway.state.in_flight, gateway.state.detached) == (0, 0)


async def test_a_real_disconnect_is_noticed() -> None:
    gateway = InProcessGateway()

    def begin(request: Request) -> None:
        gateway.log.hub.apply(frame(request.request_id, ["a"]), 0.0)

    gateway.log.on_request = begin
    async with serving(gateway) as url, http_client(url) as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as got:
            async for line in got.aiter_lines():
                if line.startswith("data: "):
                    break
        await gateway.log.wait_sent(2)
    assert gateway.log.cancellations[0].request_id == gateway.log.requests[0].request_id


async def test_delete_cancels_and_the_stream_says_so() -> None:
    gateway = InProcessGateway()
    async with gateway.client() as client, streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, ["a"]))
        response = await client.delete("/v1/requests/chatcmpl-" + request.request_id)
        assert response.status_code == 200
        assert response.json()["id"] == request.request_id
        end = ended(request.request_id, ["a"], kind=OutcomeKind.CANCELLED)
        await gateway.log.push(frame(request.request_id, [], end=end))
        await until(lambda: stream.over)
    (cancellation,) = gateway.log.cancellations
    assert cancellation.reason is CancelReason.CLIENT_REQUEST
    *chunks, error = events_of(stream.text)
    assert error["error"]["code"] == "cancelled"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None], "what was cut off did not finish"


async def test_delete_of_a_request_that_another_gateway_answers() -> None:
    gateway = InProcessGateway()
    async with gateway.client() as client:
        unknown = await client.delete("/v1/requests/r1")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
        assert "X-Session-Id" in unknown.json()["error"]["message"]
        written = await client.delete("/v1/requests/r1", headers={"X-Session-Id": "s1"})
    assert written.status_code == 202
    (cancellation,) = gateway.log.cancellations
    assert (cancellation.request_id, cancellation.session_id) == ("r1", "s1")


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


@pytest.mark.parametrize("way", [by_get, by_post])
async def test_another_gateway_resumes_after_any_event(way: Resume) -> None:
    first = InProcessGateway()
    await first.log.push(frame("r-of-somebody-else", ["x"]))
    options = {"include_usage": True}
    stream = await whole_stream(first, chat(stream=True, stream_options=options), TEXTS)
    second = InProcessGateway(partition=1)
    second.log.frames = first.log.frames
    request_id = stream.headers["x-request-id"]
    whole = events_of(stream.text)
    for i, event_id in enumerate(stream.ids):
        rest = events_of(await way(second, request_id, event_id))
        had = text_of(whole[: i + 1])
        assert had + text_of(rest) == "".join(TEXTS)
        assert rest[-2]["usage"] == whole[-2]["usage"]
        assert rest[-1] == "[DONE]"
    assert second.log.sent == second.log.resumptions
    assert not second.state.resumed


async def test_choices_are_resumed_each_from_its_place() -> None:
    first = InProcessGateway()
    stream = await whole_stream(first, chat(stream=True, n=2), TEXTS)
    second = InProcessGateway()
    second.log.frames = first.log.frames
    events = events_of(stream.text)
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


async def test_a_resumed_stream_follows_live_and_hanging_up_cancels_nothing() -> None:
    first, second = InProcessGateway(), InProcessGateway()
    second.log.frames, second.log.news = first.log.frames, first.log.news
    async with streamed_call(first, chat(stream=True)) as stream:
        (request,) = await accepted_requests(first)
        await first.log.push(frame(request.request_id, TEXTS[:2]))
        await until(lambda: len(stream.ids) == 1)
        path = f"/v1/requests/{request.request_id}/events"
        resumed = streamed_call(second, path=path, Last_Event_ID=stream.ids[0])
        left = streamed_call(second, path=path, Last_Event_ID=stream.ids[0])
        async with resumed as follower, left as leaver:
            await until(lambda: len(second.state.resumed) == 2)
            leaver.hang_up()
            await until(lambda: len(second.state.resumed) == 1)
            end = ended(request.request_id, TEXTS)
            await first.log.push(
                frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5, end=end)
            )
            await until(lambda: follower.over)
    assert text_of(events_of(follower.text)) == " wörld"
    assert second.log.sent == second.log.resumptions


async def test_without_an_event_id_the_own_gateway_starts_from_the_beginning() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream, gateway.client() as client:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(
            frame(request.request_id, TEXTS[:2]),
        )
        await until(lambda: len(stream.writes) == 1)
        path = f"/v1/requests/{request.request_id}/events"
        async with streamed_call(gateway, path=path) as again:
            await until(lambda: len(gateway.state.resumed) == 1)  # before the call is over
            end = ended(request.request_id, TEXTS)
            await gateway.log.push(
                frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5, end=end)
            )
            await until(lambda: again.over)
        assert text_of(events_of(again.text)) == "".join(TEXTS)
        gone = await client.get("/v1/requests/r1/events")
        assert gone.status_code == 404
        other = await client.get("/v1/requests/r1/events", headers={"Last-Event-ID": again.ids[0]})
        assert other.json()["error"]["message"].startswith("r1: the Last-Event-ID belongs to")


async def test_resumes_are_bounded() -> None:
    gateway = InProcessGateway(resumes_max=1)
    gateway.answer_with("a")
    async with gateway.client() as client:
        done = await client.post("/v1/chat/completions", json=chat(stream=True))
        event_id = next(line[4:] for line in done.text.splitlines() if line.startswith("id: "))
        path = f"/v1/requests/{done.headers['x-request-id']}/events"
        async with streamed_call(gateway, path=path, Last_Event_ID=event_id):
            await until(lambda: len(gateway.state.resumed) == 1)
            refused = await client.get(path, headers={"Last-Event-ID": event_id})
    assert refused.status_code == 429


async def test_a_silent_stream_is_kept_alive() -> None:
    gateway = InProcessGateway(keepalive_ms=1_000)
    async with streamed_call(gateway, chat(stream=True)) as stream:
        await accepted_requests(gateway)
        (call,) = gateway.state.hub.calls()
        gateway.state.sweep(call.arrived_s + 0.9, 0)
        gateway.state.sweep(call.arrived_s + 1.1, 0)
        gateway.state.sweep(call.arrived_s + 1.2, 0)
        await until(lambda: stream.text == ": keep-alive\n")
        assert stream.status == 200


async def test_a_deadline_that_nobody_else_keeps_is_kept_here() -> None:
    gateway = InProcessGateway()
    async with (
        streamed_call(gateway, chat()) as whole,
        streamed_call(gateway, chat(stream=True)) as stream,
    ):
        requests = await accepted_requests(gateway, 2)
        for call in gateway.state.hub.calls():
            if not call.waits_for_end:
                await gateway.log.push(frame(call.streams[0].request_id, ["a"]))
        await until(lambda: bool(stream.writes))
        gateway.state.sweep(0.0, max(r.deadline_ms for r in requests) + 2_001)
        await until(lambda: whole.over and stream.over)
        await gateway.log.wait_sent(4)
    assert whole.status == 504
    assert orjson.loads(whole.text)["error"]["code"] == "deadline_exceeded"
    assert events_of(stream.text)[-1]["error"]["code"] == "deadline_exceeded"
    assert len(gateway.log.cancellations) == 2


async def test_tokens_that_are_lost_end_the_stream() -> None:
    gateway = InProcessGateway(gap_ms=1_000)
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5))
        gateway.state.sweep(1.0, 0)
        gateway.state.sweep(1.9, 0)
        assert not stream.over
        gateway.state.sweep(2.1, 0)
        await until(lambda: stream.over)
        await gateway.log.wait_sent(2)
    assert stream.status == 500
    assert "were lost" in orjson.loads(stream.text)["error"]["message"]
    assert gateway.log.cancellations

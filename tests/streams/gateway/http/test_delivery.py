"""Server-sent events: their form, hanging up, cancelling, resuming, and a log that is silent."""

import pytest

from schemas.records import CancelReason, OutcomeKind, Request, WireError
from tests.streams.gateway.in_process import InProcessGateway, http_client, serving
from tests.streams.gateway.samples import MODEL, chat, events_of, frame, stream_end, text_of
from tests.streams.gateway.streamed_call import (
    TEXTS,
    accepted_requests,
    streamed_call,
)
from tests.waits import until


async def test_stream_writes_once_per_batch_of_frames() -> None:
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
        assert len(events_of(stream.writes[0])) == 2, "the role, and the text"
        assert len(events_of(stream.writes[1])) == 1
        end = stream_end(request.request_id, TEXTS)
        await gateway.log.push(
            frame(request.request_id, TEXTS[4:], first_seq=4, first_char=9, end=end)
        )
        await until(lambda: stream.over)
        assert len(stream.writes) == 3
    events = events_of(stream.text)
    assert text_of(events) == "".join(TEXTS)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[-1] == "[DONE]"
    finish = events[-2]
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish["trivium"]["decode_worker"] == "decode-1"
    assert finish["trivium"]["session_id"] == request.session_id
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-request-id"] == request.request_id
    assert gateway.state.calls.in_flight == 0
    assert len(gateway.log.hub) == 0
    assert not gateway.log.cancellations


async def test_stream_ends_with_usage_on_request() -> None:
    gateway = InProcessGateway()
    gateway.answer_with(*TEXTS)
    async with gateway.client() as client:
        body = chat(stream=True, stream_options={"include_usage": True})
        events = events_of((await client.post("/v1/chat/completions", json=body)).text)
    assert [event["usage"] for event in events[:-2]] == [None, None, None]
    usage = events[-2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage["trivium"]["mode"] == "remote"


async def test_stream_merges_choices_with_index_and_token_ids() -> None:
    gateway = InProcessGateway()
    body = {"model": MODEL, "prompt": "x", "n": 2, "stream": True, "return_token_ids": True}
    async with streamed_call(gateway, body, "/v1/completions") as stream:
        first, second = await accepted_requests(gateway, 2)
        await gateway.log.push(frame(second.request_id, ["b"]), frame(first.request_id, ["a"]))
        await gateway.log.push(frame(first.request_id, [], end=stream_end(first.request_id, ["a"])))
        await until(lambda: "stop" in stream.text)
        assert not stream.over
        await gateway.log.push(
            frame(second.request_id, ["c"], first_seq=1, first_char=1,
                  end=stream_end(second.request_id, ["b", "c"]))
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


async def test_stream_waits_for_late_first_token() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[1:], first_seq=1, first_char=2,
                                 end=stream_end(request.request_id, TEXTS)))  # fmt: skip
        await gateway.log.push(frame(request.request_id, TEXTS[:1]))
        await until(lambda: stream.over)
    assert text_of(events_of(stream.text)) == "".join(TEXTS)


async def test_higher_attempt_continues_stream() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:3]))
        await until(lambda: len(stream.writes) == 1)
        end = stream_end(request.request_id, TEXTS, attempt=2)
        await gateway.log.push(
            frame(request.request_id, TEXTS[:1], attempt=2),
            frame(request.request_id, TEXTS[3:4], first_seq=3, first_char=6),  # the lost worker
            frame(request.request_id, TEXTS[1:], attempt=2, first_seq=1, first_char=2, end=end),
        )
        await until(lambda: stream.over)
    assert text_of(events_of(stream.text)) == "".join(TEXTS)


async def test_broken_stream_ends_with_error_without_done() -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:1]))
        await until(lambda: len(stream.writes) == 1)
        error = WireError(code="worker_lost", message="decode-1 is silent")
        end = stream_end(request.request_id, kind=OutcomeKind.FAILED, error=error)
        await gateway.log.push(
            frame(request.request_id, TEXTS[1:2], first_seq=1, first_char=2, end=end)
        )
        await until(lambda: stream.over)
    events = events_of(stream.text)
    assert text_of(events) == "Héllo"
    assert events[-1]["error"]["code"] == "worker_lost"
    assert stream.status == 200


@pytest.mark.parametrize("stream_it", [True, False])
async def test_disconnect_cancels_active_requests(stream_it: bool) -> None:
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=stream_it, n=2)) as stream:
        first, second = await accepted_requests(gateway, 2)
        await gateway.log.push(
            frame(first.request_id, ["a"], end=stream_end(first.request_id, ["a"]))
        )
        stream.hang_up()
        await gateway.log.wait_sent(3)
    (cancellation,) = gateway.log.cancellations  # the first choice had ended
    assert cancellation.request_id == second.request_id
    assert cancellation.session_id == second.session_id
    assert cancellation.reason is CancelReason.CLIENT_GONE
    assert gateway.state.calls.in_flight == 0


@pytest.mark.parametrize("stream_it", [True, False])
async def test_disconnect_continues_generation_on_request(stream_it: bool) -> None:
    """A request without client counts as in flight until it ends."""
    gateway = InProcessGateway(in_flight_max=1)
    async with streamed_call(
        gateway, chat(stream=stream_it), X_Trivium_On_Disconnect="continue"
    ) as stream:
        (request,) = await accepted_requests(gateway)
        await gateway.log.push(frame(request.request_id, TEXTS[:1]))
        stream.hang_up()
        await until(lambda: gateway.state.calls.detached == 1)
        await gateway.state.calls.wait_until_idle(60_000)  # nobody has to wait for it
        async with gateway.client() as client:
            refused = await client.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 429
        end = stream_end(request.request_id, TEXTS[:2])
        await gateway.log.push(
            frame(request.request_id, TEXTS[1:2], first_seq=1, first_char=2, end=end)
        )
        await until(lambda: gateway.state.calls.in_flight == 0)
    assert gateway.state.calls.detached == 0
    assert not gateway.log.cancellations


async def test_detached_request_ends_at_deadline() -> None:
    """It then frees its capacity."""
    gateway = InProcessGateway()
    async with streamed_call(
        gateway, chat(stream=True), X_Trivium_On_Disconnect="continue"
    ) as stream:
        (request,) = await accepted_requests(gateway)
        stream.hang_up()
        await until(lambda: gateway.state.calls.detached == 1)
        gateway.state.calls.sweep(0.0, request.deadline_ms + 2_001)
        await gateway.log.wait_sent(2)
    assert [c.request_id for c in gateway.log.cancellations] == [request.request_id]
    assert (gateway.state.calls.in_flight, gateway.state.calls.detached) == (0, 0)


async def test_gateway_notices_real_disconnect() -> None:
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

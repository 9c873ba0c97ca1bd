"""Stored responses again, at any gateway: polls, streams, cancelling, deleting, and next turns."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.records import OutcomeKind, StreamVoid
from schemas.rules.tokens import pack_tokens, token_count
from streams.agents.outbox import void_frame
from streams.calls.request.chat import Chat
from streams.gateway import app
from tests.streams.gateway.answering import (
    RESPONSE,
    TEXTS,
    answer,
    answering,
    beside,
    body,
    checked,
    spelled,
)
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, frame, stream_end
from tests.streams.gateway.small_tokenizer import tokenizer
from tests.streams.gateway.streamed_call import streamed_call
from tests.waits import until

PATH = "/v1/responses"


async def get(gateway: InProcessGateway, path: str, method: str = "GET", key: str = "") -> Any:
    """Status and JSON."""
    async with gateway.client() as client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = await client.request(method, f"{PATH}/{path}", headers=headers)
        return response.status_code, response.json()


async def start_background(gateway: InProcessGateway, **fields: Any) -> str:
    """A response in the background."""
    status, response = await call(gateway, body(background=True, **fields), PATH)
    assert status == 200 and response["status"] == "queued", response
    RESPONSE.validate_python(response)
    return str(response["id"])


async def test_second_gateway_returns_current_state_of_response() -> None:
    """It reads the log alone, whichever gateway accepted the call."""
    first = InProcessGateway()
    name = await start_background(first)
    (request,) = first.log.requests
    assert request.keeps_running
    second = beside(first)
    assert (await get(second, name))[1]["status"] == "queued"
    await first.log.push(frame(request.request_id, TEXTS[:2]))
    status, response = await get(second, name)
    assert (response["status"], response["output"][0]["content"][0]["text"]) == (
        "in_progress",
        "Pier ",
    )
    end = stream_end(request.request_id, TEXTS)
    await first.log.push(frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5, end=end))
    for gateway in (first, second):
        status, response = await get(gateway, name)
        RESPONSE.validate_python(response)
        assert (status, response["status"]) == (200, "completed")
        assert response["output"][0]["content"][0]["text"] == "".join(TEXTS)
    assert not second.log.sent_records and not first.log.cancellations
    await until(lambda: not first.state.calls.in_flight)


async def test_poll_reports_progress_of_voided_attempt_until_next_starts() -> None:
    """The router waits for that report only until it has placed the request again."""
    first = InProcessGateway()
    name = await start_background(first)
    (request,) = first.log.requests
    second, reports = beside(first), list[tuple[int, int]]()
    second.state.calls.hub.on_void = lambda so_far: reports.append(
        (so_far.attempt, token_count(so_far.tokens))
    )
    await first.log.push(frame(request.request_id, TEXTS[:2]))
    void = StreamVoid(request_id=request.request_id, attempt=1)
    await first.log.push(void_frame(void, "router-a", 1))
    assert (await get(second, name))[1]["status"] == "in_progress"
    assert reports == [(1, 2)]
    later = frame(request.request_id, TEXTS[2:3], attempt=2, first_seq=2, first_char=5)
    await first.log.push(later)
    assert (await get(second, name))[1]["status"] == "in_progress"
    assert reports == [(1, 2)]


async def test_poll_reports_end_of_voided_attempt() -> None:
    """Otherwise the router would run another attempt, which nobody reads."""
    first = InProcessGateway()
    name = await start_background(first)
    (request,) = first.log.requests
    second, reports = beside(first), list[int]()
    second.state.calls.hub.on_void = lambda so_far: reports.append(
        so_far.attempt if so_far.end else 0
    )
    void = StreamVoid(request_id=request.request_id, attempt=1)
    await first.log.push(void_frame(void, "router-a", 1))
    end = stream_end(request.request_id, TEXTS)
    await first.log.push(frame(request.request_id, TEXTS, end=end))
    assert (await get(second, name))[1]["status"] == "completed"
    assert reports == [1]


async def test_background_response_without_reader_takes_last_attempt() -> None:
    """Its client has disconnected; attempts that differ do not make it fail."""
    gateway = InProcessGateway()
    async with streamed_call(gateway, body(stream=True, background=True), PATH) as stream:
        await until(lambda: bool(stream.writes))
        (request,) = gateway.log.requests
        await gateway.log.push(frame(request.request_id, TEXTS[:2]))
        await until(lambda: len(stream.writes) == 2)
    name = checked(stream.text)[0]["response"]["id"]
    await until(lambda: bool(gateway.state.calls.detached))
    whole = ["North", " ", "of it."]
    end = stream_end(request.request_id, whole, attempt=2)
    await gateway.log.push(frame(request.request_id, whole[:2], attempt=2))
    last = frame(request.request_id, whole[2:], attempt=2, first_seq=2, first_char=6, end=end)
    await gateway.log.push(last)
    await until(lambda: not gateway.state.calls.in_flight)
    assert not gateway.log.cancellations
    response = (await get(gateway, name))[1]
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == "".join(whole)


async def test_second_gateway_resumes_response_stream_after_any_event() -> None:
    """No event is repeated or lost."""
    first = answering()
    async with first.client() as client:
        whole = checked((await client.post(PATH, json=body(stream=True))).text)
    name = whole[0]["response"]["id"]
    second = beside(first)
    for i, event in enumerate(whole):
        after = event["sequence_number"]
        async with second.client() as client:
            rest = await client.get(f"{PATH}/{name}?stream=true&starting_after={after}")
        assert rest.status_code == 200
        events = checked(rest.text)
        assert spelled([*whole[: i + 1], *events]) == "".join(TEXTS)
        assert all(rest_event["sequence_number"] > after for rest_event in events)
        if not after >= whole[-1]["sequence_number"]:
            assert events[-1] == whole[-1]
    async with second.client() as client:
        replay = checked((await client.get(f"{PATH}/{name}?stream=true")).text)
    assert replay[:4] == whole[:4] and replay[-4:] == whole[-4:]


async def test_gateways_number_response_events_alike() -> None:
    """A number within one gateway's write is a valid position at another."""
    first = InProcessGateway()
    async with streamed_call(first, body(stream=True, background=True), PATH) as stream:
        await until(lambda: bool(stream.writes))
        (request,) = first.log.requests
        for seq, text in enumerate(TEXTS):
            before = len("".join(TEXTS[:seq]))
            await first.log.push(
                frame(request.request_id, [text], first_seq=seq, first_char=before)
            )
            await until(lambda seq=seq: len(stream.writes) == seq + 2)
        live_events = checked(stream.text)
    assert len([e for e in live_events if e["type"] == "response.output_text.delta"]) == len(TEXTS)
    await first.log.push(frame(request.request_id, [], end=stream_end(request.request_id, TEXTS)))
    name, second = live_events[0]["response"]["id"], beside(first)
    for i, event in enumerate(live_events):
        async with second.client() as client:
            query = f"stream=true&starting_after={event['sequence_number']}"
            events = checked((await client.get(f"{PATH}/{name}?{query}")).text)
        assert spelled([*live_events[: i + 1], *events]) == "".join(TEXTS)
    assert not first.log.cancellations, "what runs in the background outlives its client"


async def test_resumed_response_stream_follows_live() -> None:
    first = InProcessGateway()
    name = await start_background(first)
    (request,) = first.log.requests
    second = beside(first)
    async with streamed_call(second, path=f"{PATH}/{name}", query="stream=true") as stream:
        await until(lambda: len(stream.writes) == 1)
        await first.log.push(frame(request.request_id, TEXTS[:2]))
        await until(lambda: spelled(checked(stream.text)) == "Pier ")
        end = stream_end(request.request_id, TEXTS)
        await first.log.push(
            frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5, end=end)
        )
        await until(lambda: stream.over)
    assert checked(stream.text)[-1]["response"]["status"] == "completed"
    assert [resumption.request_id for resumption in second.log.resumptions] == [request.request_id]


async def test_background_response_is_cancelled_at_second_gateway() -> None:
    first = InProcessGateway()
    name = await start_background(first)
    (request,) = first.log.requests
    second = beside(first)

    def end_it(record: Any) -> None:
        end = stream_end(request.request_id, kind=OutcomeKind.CANCELLED)
        first.log.frames.append(frame(request.request_id, [], end=end))

    second.log.on_cancellation = end_it
    status, response = await get(second, f"{name}/cancel", "POST")
    assert (status, response["status"], response["error"]) == (200, "cancelled", None)
    RESPONSE.validate_python(response)
    assert [cancellation.request_id for cancellation in second.log.cancellations] == [
        request.request_id
    ]
    status, repeat = await get(second, f"{name}/cancel", "POST")
    assert repeat == response and len(second.log.cancellations) == 1
    async with second.client() as client:
        events = checked((await client.get(f"{PATH}/{name}?stream=true")).text)
    assert events[-1]["response"]["status"] == "cancelled"


async def test_cancellation_rejects_foreground_response() -> None:
    gateway = answering()
    _, response = await call(gateway, body(), PATH)
    status, refused = await get(gateway, f"{response['id']}/cancel", "POST")
    assert status == 400 and "background=true" in refused["error"]["message"]


async def test_deleted_response_is_unknown_to_all_gateways() -> None:
    first = answering()
    _, response = await call(first, body(), PATH)
    second = beside(first)
    status, deletion = await get(second, response["id"], "DELETE")
    assert (status, deletion["deleted"], deletion["id"]) == (200, True, response["id"])
    for path in (response["id"], f"{response['id']}/input_items"):
        assert (await get(first, path))[0] == 404
    status, _ = await call(first, body(previous_response_id=response["id"]), PATH)
    assert status == 404


async def test_deletion_cancels_running_response() -> None:
    gateway = InProcessGateway()
    name = await start_background(gateway)
    second_gateway = beside(gateway)
    assert (await get(second_gateway, name, "DELETE"))[0] == 200
    (request,) = gateway.log.requests
    assert [cancellation.request_id for cancellation in second_gateway.log.cancellations] == [
        request.request_id
    ]


async def test_background_response_survives_drain() -> None:
    """A draining gateway cancels only the answers that clients wait for."""
    gateway = InProcessGateway(grace_ms=0)
    await start_background(gateway)

    class Leaving:
        async def drain(self) -> None:
            pass

    await app._drain(gateway.state, Leaving())  # type: ignore[arg-type]  # all that is asked of it
    assert not gateway.log.cancellations


async def test_failed_response_stream_has_no_events_after_end() -> None:
    gateway = answering("a", kind=OutcomeKind.FAILED)
    async with gateway.client() as client:
        whole = checked((await client.post(PATH, json=body(stream=True))).text)
        last = whole[-1]
        query = f"stream=true&starting_after={last['sequence_number']}"
        rest = await client.get(f"{PATH}/{last['response']['id']}?{query}")
    assert last["type"] == "response.failed"
    assert rest.status_code == 200 and not checked(rest.text)


async def test_input_items_are_paginated() -> None:
    gateway = answering()
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    _, response = await call(gateway, body(items), PATH)
    name = f"{response['id']}/input_items"
    _, page = await get(gateway, f"{name}?limit=2&order=asc")
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["0", "1"] and page["has_more"]
    _, rest = await get(gateway, f"{name}?order=asc&after={page['last_id']}")
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "3", "4"]
    assert not rest["has_more"]
    _, newest = await get(gateway, f"{name}?limit=1")
    assert newest["data"][0]["content"][0]["text"] == "4"


async def test_next_response_continues_earlier_conversation() -> None:
    """Any gateway adds the earlier turns and keeps the session, without the instructions."""
    first = answering()
    _, response = await call(first, body("one", instructions="be kind"), PATH)
    second = beside(first)
    second.log.on_request = lambda request: answer(second, request, ["two!"])
    _, next_one = await call(second, body("two", previous_response_id=response["id"]), PATH)
    assert next_one["previous_response_id"] == response["id"] and next_one["instructions"] is None
    third = beside(first)
    third.log.on_request = lambda request: answer(third, request)
    third.log.frames = second.log.frames
    await call(third, body("three", previous_response_id=next_one["id"]), PATH)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "".join(TEXTS)},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "two!"},
        {"role": "user", "content": "three"},
    ]
    (request,) = third.log.requests
    prompt = await tokenizer().encode_chat(Chat(messages=messages), check_chars=lambda _: None)
    assert request.prompt_tokens == pack_tokens(prompt)
    sessions = {gateway.log.requests[0].session_id for gateway in (first, second, third)}
    assert len(sessions) == 1 and request.turn == 2


async def test_next_response_rejects_unfinished_or_failed_predecessor() -> None:
    gateway = InProcessGateway()
    name = await start_background(gateway)
    status, response = await call(gateway, body(previous_response_id=name), PATH)
    assert status == 400 and "still in progress" in response["error"]["message"]
    (request,) = gateway.log.requests
    end = stream_end(request.request_id, kind=OutcomeKind.CANCELLED)
    await gateway.log.push(frame(request.request_id, [], end=end))
    status, response = await call(gateway, body(previous_response_id=name), PATH)
    assert status == 400 and "without an answer (cancelled)" in response["error"]["message"]


async def test_response_is_hidden_from_other_keys() -> None:
    gateway = answering(api_keys=("one", "two"))
    _, response = await call(gateway, body(), PATH, authorization="Bearer one")
    name = response["id"]
    for path, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")):
        assert (await get(gateway, name + path, method, "two"))[0] == 404
    status, _ = await call(
        gateway, body(previous_response_id=name), PATH, authorization="Bearer two"
    )
    assert status == 404
    assert (await get(gateway, name))[0] == 401
    assert (await get(gateway, name, key="one"))[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("resp_1", 404),
        ("resp_" + "x" * 5_000, 404),
        ("%00%ff", 404),
        ("{id}x", 404),
        ("{cut}_", 404),
        ("{id}?stream=yes", 400),
        ("{id}?stream=true&starting_after=-1", 400),
        ("{id}?stream=true&starting_after=" + "9" * 30, 400),
        ("{id}?starting_after=3", 400),
        ("{id}?what=1", 400),
        ("{id}?include=web_search_call.what", 400),
        ("{id}/input_items?limit=0", 400),
        ("{id}/input_items?limit=x", 400),
        ("{id}/input_items?order=up", 400),
        ("{id}/input_items?after=msg_x", 400),
        ("{id}?" + "&".join(f"include={n}" for n in range(99)), 400),
    ],
)
async def test_stored_response_rejects_hostile_ids_and_queries(path: str, status: int) -> None:
    gateway = answering()
    _, response = await call(gateway, body(), PATH)
    name = response["id"]
    found_status, refused = await get(gateway, path.format(id=name, cut=name[:-1]))
    assert found_status == status, refused
    assert refused["error"]["message"]


async def test_event_number_beyond_end_yields_empty_stream() -> None:
    gateway = answering()
    _, response = await call(gateway, body(), PATH)
    async with gateway.client() as client:
        rest = await client.get(f"{PATH}/{response['id']}?stream=true&starting_after={10**9}")
    assert rest.status_code == 200 and not checked(rest.text)


async def test_response_without_end_fails_after_deadline() -> None:
    gateway = InProcessGateway(deadline_ms=1)
    name = await start_background(gateway)
    (record,) = gateway.log.responses.records
    gateway.log.responses.records = [replace(record, deadline_ms=record.deadline_ms - 60_000)]
    _, response = await get(gateway, name)
    assert response["status"] == "failed" and "deadline" in response["error"]["message"]
    assert response["model"] == MODEL

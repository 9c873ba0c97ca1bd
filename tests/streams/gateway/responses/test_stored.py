"""Stored responses again, at any gateway: polls, streams, cancelling, deleting, and next turns."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.records import OutcomeKind, StreamVoid
from schemas.rules.tokens import pack_tokens, token_count
from streams.agents.records import void_frame
from streams.gateway import app
from streams.gateway.request.tokenizer import Chat
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.responses.answering import (
    RESPONSE,
    TEXTS,
    answer,
    answering,
    beside,
    body,
    checked,
    spelled,
)
from tests.streams.gateway.samples import MODEL, ended, frame
from tests.streams.gateway.small_tokenizer import tokenizer
from tests.streams.gateway.streamed_call import streamed_call
from tests.waiting import until

PATH = "/v1/responses"


async def get(gateway: InProcessGateway, path: str, method: str = "GET", key: str = "") -> Any:
    """Status and JSON."""
    async with gateway.client() as client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = await client.request(method, f"{PATH}/{path}", headers=headers)
        return response.status_code, response.json()


async def begun(gateway: InProcessGateway, **fields: Any) -> str:
    """A response in the background."""
    status, found = await call(gateway, body(background=True, **fields), PATH)
    assert status == 200 and found["status"] == "queued", found
    RESPONSE.validate_python(found)
    return str(found["id"])


async def test_another_gateway_tells_a_response_as_it_is_by_now() -> None:
    """From the log alone, whoever took the call."""
    first = InProcessGateway()
    name = await begun(first)
    (request,) = first.log.requests
    assert request.keeps_running
    other = beside(first)
    assert (await get(other, name))[1]["status"] == "queued"
    await first.log.push(frame(request.request_id, TEXTS[:2]))
    status, found = await get(other, name)
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("in_progress", "Pier ")
    end = ended(request.request_id, TEXTS)
    await first.log.push(frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5, end=end))
    for gateway in (first, other):
        status, found = await get(gateway, name)
        RESPONSE.validate_python(found)
        assert (status, found["status"]) == (200, "completed")
        assert found["output"][0]["content"][0]["text"] == "".join(TEXTS)
    assert not other.log.sent and not first.log.cancellations
    await until(lambda: not first.state.in_flight)


async def test_a_poll_says_what_there_is_only_where_nothing_goes_on_yet() -> None:
    """Its router waits for that word only until it has placed the request again."""
    first = InProcessGateway()
    name = await begun(first)
    (request,) = first.log.requests
    other, told = beside(first), list[tuple[int, int]]()
    other.state.hub.on_void = lambda so_far: told.append(
        (so_far.attempt, token_count(so_far.tokens))
    )
    await first.log.push(frame(request.request_id, TEXTS[:2]))
    void = StreamVoid(request_id=request.request_id, attempt=1)
    await first.log.push(void_frame(void, "router-a", 1))
    assert (await get(other, name))[1]["status"] == "in_progress"
    assert told == [(1, 2)]
    later = frame(request.request_id, TEXTS[2:3], attempt=2, first_seq=2, first_char=5)
    await first.log.push(later)
    assert (await get(other, name))[1]["status"] == "in_progress"
    assert told == [(1, 2)]


async def test_a_poll_tells_an_end_of_what_was_given_up() -> None:
    """Its router would run another attempt, which nobody reads (found 28)."""
    first = InProcessGateway()
    name = await begun(first)
    (request,) = first.log.requests
    other, told = beside(first), list[int]()
    other.state.hub.on_void = lambda so_far: told.append(so_far.attempt if so_far.end else 0)
    void = StreamVoid(request_id=request.request_id, attempt=1)
    await first.log.push(void_frame(void, "router-a", 1))
    end = ended(request.request_id, TEXTS)
    await first.log.push(frame(request.request_id, TEXTS, end=end))
    assert (await get(other, name))[1]["status"] == "completed"
    assert told == [1]


async def test_what_nobody_reads_any_more_fails_for_no_difference() -> None:
    """The client of a stream in the background has gone; polls tell the answer of the last
    attempt."""
    gateway = InProcessGateway()
    async with streamed_call(gateway, body(stream=True, background=True), PATH) as stream:
        await until(lambda: bool(stream.writes))
        (request,) = gateway.log.requests
        await gateway.log.push(frame(request.request_id, TEXTS[:2]))
        await until(lambda: len(stream.writes) == 2)
    name = checked(stream.text)[0]["response"]["id"]
    await until(lambda: bool(gateway.state.detached))
    whole = ["North", " ", "of it."]
    end = ended(request.request_id, whole, attempt=2)
    await gateway.log.push(frame(request.request_id, whole[:2], attempt=2))
    last = frame(request.request_id, whole[2:], attempt=2, first_seq=2, first_char=6, end=end)
    await gateway.log.push(last)
    await until(lambda: not gateway.state.in_flight)
    assert not gateway.log.cancellations
    found = (await get(gateway, name))[1]
    assert found["status"] == "completed"
    assert found["output"][0]["content"][0]["text"] == "".join(whole)


async def test_another_gateway_goes_on_after_any_event() -> None:
    """No event twice, and none left out."""
    first = answering()
    async with first.client() as client:
        whole = checked((await client.post(PATH, json=body(stream=True))).text)
    name = whole[0]["response"]["id"]
    other = beside(first)
    for i, event in enumerate(whole):
        after = event["sequence_number"]
        async with other.client() as client:
            rest = await client.get(f"{PATH}/{name}?stream=true&starting_after={after}")
        assert rest.status_code == 200
        events = checked(rest.text)
        assert spelled([*whole[: i + 1], *events]) == "".join(TEXTS)
        assert all(each["sequence_number"] > after for each in events)
        if not after >= whole[-1]["sequence_number"]:
            assert events[-1] == whole[-1]
    async with other.client() as client:
        again = checked((await client.get(f"{PATH}/{name}?stream=true")).text)
    assert again[:4] == whole[:4] and again[-4:] == whole[-4:]


async def test_every_gateway_numbers_a_delta_alike() -> None:
    """A number inside of what one has written in one piece is a place at another."""
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
        seen = checked(stream.text)
    assert len([e for e in seen if e["type"] == "response.output_text.delta"]) == len(TEXTS)
    await first.log.push(frame(request.request_id, [], end=ended(request.request_id, TEXTS)))
    name, other = seen[0]["response"]["id"], beside(first)
    for i, event in enumerate(seen):
        async with other.client() as client:
            query = f"stream=true&starting_after={event['sequence_number']}"
            events = checked((await client.get(f"{PATH}/{name}?{query}")).text)
        assert spelled([*seen[: i + 1], *events]) == "".join(TEXTS)
    assert not first.log.cancellations, "what runs in the background outlives its client"


async def test_a_resumed_stream_follows_live() -> None:
    first = InProcessGateway()
    name = await begun(first)
    (request,) = first.log.requests
    other = beside(first)
    async with streamed_call(other, path=f"{PATH}/{name}", query="stream=true") as stream:
        await until(lambda: len(stream.writes) == 1)
        await first.log.push(frame(request.request_id, TEXTS[:2]))
        await until(lambda: spelled(checked(stream.text)) == "Pier ")
        end = ended(request.request_id, TEXTS)
        await first.log.push(
            frame(request.request_id, TEXTS[2:], first_seq=2, first_char=5, end=end)
        )
        await until(lambda: stream.over)
    assert checked(stream.text)[-1]["response"]["status"] == "completed"
    assert [each.request_id for each in other.log.resumptions] == [request.request_id]


async def test_a_response_in_the_background_is_cancelled_anywhere() -> None:
    first = InProcessGateway()
    name = await begun(first)
    (request,) = first.log.requests
    other = beside(first)

    def end_it(record: Any) -> None:
        end = ended(request.request_id, kind=OutcomeKind.CANCELLED)
        first.log.frames.append(frame(request.request_id, [], end=end))

    other.log.on_cancellation = end_it
    status, found = await get(other, f"{name}/cancel", "POST")
    assert (status, found["status"], found["error"]) == (200, "cancelled", None)
    RESPONSE.validate_python(found)
    assert [each.request_id for each in other.log.cancellations] == [request.request_id]
    status, again = await get(other, f"{name}/cancel", "POST")
    assert again == found and len(other.log.cancellations) == 1
    async with other.client() as client:
        events = checked((await client.get(f"{PATH}/{name}?stream=true")).text)
    assert events[-1]["response"]["status"] == "cancelled"


async def test_only_what_runs_in_the_background_is_cancelled() -> None:
    gateway = answering()
    _, found = await call(gateway, body(), PATH)
    status, refused = await get(gateway, f"{found['id']}/cancel", "POST")
    assert status == 400 and "background=true" in refused["error"]["message"]


async def test_a_deleted_response_is_known_nowhere() -> None:
    first = answering()
    _, found = await call(first, body(), PATH)
    other = beside(first)
    status, gone = await get(other, found["id"], "DELETE")
    assert (status, gone["deleted"], gone["id"]) == (200, True, found["id"])
    for path in (found["id"], f"{found['id']}/input_items"):
        assert (await get(first, path))[0] == 404
    status, _ = await call(first, body(previous_response_id=found["id"]), PATH)
    assert status == 404


async def test_deleting_ends_what_runs() -> None:
    gateway = InProcessGateway()
    name = await begun(gateway)
    other = beside(gateway)
    assert (await get(other, name, "DELETE"))[0] == 200
    (request,) = gateway.log.requests
    assert [each.request_id for each in other.log.cancellations] == [request.request_id]


async def test_what_runs_in_the_background_outlives_a_stop() -> None:
    """A gateway that drains cancels whole answers that clients wait for, and no others."""
    gateway = InProcessGateway(grace_ms=0)
    await begun(gateway)

    class Leaving:
        async def drain(self) -> None:
            pass

    await app._drain(gateway.state, Leaving())  # type: ignore[arg-type]  # all that is asked of it
    assert not gateway.log.cancellations


async def test_a_stream_that_failed_has_nothing_after_its_end() -> None:
    gateway = answering("a", kind=OutcomeKind.FAILED)
    async with gateway.client() as client:
        whole = checked((await client.post(PATH, json=body(stream=True))).text)
        last = whole[-1]
        query = f"stream=true&starting_after={last['sequence_number']}"
        rest = await client.get(f"{PATH}/{last['response']['id']}?{query}")
    assert last["type"] == "response.failed"
    assert rest.status_code == 200 and not checked(rest.text)


async def test_input_items_come_in_pages() -> None:
    gateway = answering()
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    _, found = await call(gateway, body(items), PATH)
    name = f"{found['id']}/input_items"
    _, page = await get(gateway, f"{name}?limit=2&order=asc")
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["0", "1"] and page["has_more"]
    _, rest = await get(gateway, f"{name}?order=asc&after={page['last_id']}")
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "3", "4"]
    assert not rest["has_more"]
    _, newest = await get(gateway, f"{name}?limit=1")
    assert newest["data"][0]["content"][0]["text"] == "4"


async def test_a_next_response_goes_on_from_an_earlier_one() -> None:
    """At any gateway, with what was said and in its session, without its instructions."""
    first = answering()
    _, found = await call(first, body("one", instructions="be kind"), PATH)
    second = beside(first)
    second.log.on_request = lambda request: answer(second, request, ["two!"])
    _, next_one = await call(second, body("two", previous_response_id=found["id"]), PATH)
    assert next_one["previous_response_id"] == found["id"] and next_one["instructions"] is None
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
    sessions = {each.log.requests[0].session_id for each in (first, second, third)}
    assert len(sessions) == 1 and request.turn == 2


async def test_nothing_follows_a_response_that_has_no_answer_yet() -> None:
    gateway = InProcessGateway()
    name = await begun(gateway)
    status, found = await call(gateway, body(previous_response_id=name), PATH)
    assert status == 400 and "still in progress" in found["error"]["message"]
    (request,) = gateway.log.requests
    end = ended(request.request_id, kind=OutcomeKind.CANCELLED)
    await gateway.log.push(frame(request.request_id, [], end=end))
    status, found = await call(gateway, body(previous_response_id=name), PATH)
    assert status == 400 and "without an answer (cancelled)" in found["error"]["message"]


async def test_a_response_belongs_to_its_key() -> None:
    """Nobody else reads, goes on from, cancels or deletes it."""
    gateway = answering(api_keys=("one", "two"))
    _, found = await call(gateway, body(), PATH, authorization="Bearer one")
    name = found["id"]
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
async def test_hostile_ids_and_queries_are_refused(path: str, status: int) -> None:
    gateway = answering()
    _, found = await call(gateway, body(), PATH)
    name = found["id"]
    found_status, refused = await get(gateway, path.format(id=name, cut=name[:-1]))
    assert found_status == status, refused
    assert refused["error"]["message"]


async def test_a_number_beyond_the_end_gets_an_empty_rest() -> None:
    gateway = answering()
    _, found = await call(gateway, body(), PATH)
    async with gateway.client() as client:
        rest = await client.get(f"{PATH}/{found['id']}?stream=true&starting_after={10**9}")
    assert rest.status_code == 200 and not checked(rest.text)


async def test_an_answer_that_nobody_ended_has_failed() -> None:
    gateway = InProcessGateway(deadline_ms=1)
    name = await begun(gateway)
    (record,) = gateway.log.responses.records
    gateway.log.responses.records = [replace(record, deadline_ms=record.deadline_ms - 60_000)]
    _, found = await get(gateway, name)
    assert found["status"] == "failed" and "deadline" in found["error"]["message"]
    assert found["model"] == MODEL

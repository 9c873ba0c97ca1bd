"""Conversations at two gateways of one deployment, with the types of the stock `openai` client."""

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.conversations import ConversationItem, ConversationItemList
from pydantic import TypeAdapter

from schemas.errors import BrokerUnavailable
from schemas.records import OutcomeKind
from streams.gateway.endpoints import conversations
from streams.gateway.endpoints.conversations import settle_overdue
from tests.streams.gateway.answering import TEXTS, answer, answering, beside, body
from tests.streams.gateway.in_process import InProcessGateway, call, stock_clients
from tests.streams.gateway.samples import MODEL, frame, stream_end
from tests.waits import until

PATH, RESPONSES = "/v1/conversations", "/v1/responses"
ITEM: TypeAdapter[Any] = TypeAdapter(ConversationItem)
TEXT = "".join(TEXTS)
HELLO = {"role": "user", "content": "hello"}


def pair(**settings: Any) -> tuple[InProcessGateway, InProcessGateway]:
    """Two gateways that read the same log; the first one answers at once."""
    first = answering(**settings)
    return first, second_of(first, **settings)


def second_of(first: InProcessGateway, **settings: Any) -> InProcessGateway:
    second = beside(first, **settings)
    second.objects = second.state.objects = first.objects
    second.log.on_request = lambda request: answer(second, request)
    return second


async def ask(
    gateway: InProcessGateway, path: str, method: str = "GET", key: str = "", **fields: Any
) -> tuple[int, Any]:
    """Status and JSON."""
    async with gateway.client() as client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = await client.request(
            method, PATH + path, json=fields if method == "POST" else None, headers=headers
        )
        return response.status_code, response.json()


async def new_conversation(gateway: InProcessGateway, *items: Any, key: str = "") -> str:
    status, answer_json = await ask(gateway, "", "POST", key=key, items=list(items))
    assert status == 200, answer_json
    return str(answer_json["id"])


async def texts(gateway: InProcessGateway, conversation_id: str) -> list[str]:
    """The texts of a conversation's messages."""
    _, page = await ask(gateway, f"/{conversation_id}/items?order=asc&limit=100")
    ConversationItemList.model_validate(page)
    for item in page["data"]:
        ITEM.validate_python(item)
    return [item["content"][0]["text"] for item in page["data"] if item["type"] == "message"]


def message_of(item: Any) -> tuple[str, str]:
    """The role and the text of a message."""
    return item.role, item.content[0].text


async def test_stock_client_keeps_and_deletes_conversations() -> None:
    first, second = pair(api_keys=("key", "other"))
    async with stock_clients(first, second) as (first_client, second_client):
        conversation = await first_client.conversations.create(
            metadata={"topic": "ferries"}, items=[{"role": "user", "content": "Hi."}]
        )
        assert conversation.object == "conversation" and conversation.metadata == {
            "topic": "ferries"
        }
        added = await second_client.conversations.items.create(
            conversation.id,
            items=[
                {"type": "message", "role": "assistant", "content": "Hello."},
                {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "done"},
                {"type": "reasoning", "id": "rs_1", "summary": []},
            ],
            include=["reasoning.encrypted_content"],
        )
        assert [item.type for item in added.data][1:] == [
            *("function_call", "function_call_output", "reasoning"),
        ]
        assert (added.first_id, added.last_id) == (added.data[0].id, "rs_1")
        listed = [
            item async for item in first_client.conversations.items.list(conversation.id, limit=2)
        ]
        assert [item.type for item in listed] == [
            *("reasoning", "function_call_output", "function_call", "message", "message"),
        ]
        rising = await second_client.conversations.items.list(
            conversation.id,
            order="asc",
            after=str(listed[-1].id),
            limit=1,
            include=["file_search_call.results"],
        )
        assert [item.id for item in rising.data] == [added.first_id] and rising.has_more
        one_item = await second_client.conversations.items.retrieve(
            "rs_1", conversation_id=conversation.id
        )
        assert one_item.type == "reasoning"
        rest = await second_client.conversations.items.delete(
            "rs_1", conversation_id=conversation.id
        )
        assert rest.id == conversation.id
        with pytest.raises(openai.NotFoundError):
            await first_client.conversations.items.retrieve("rs_1", conversation_id=conversation.id)
        changed = await first_client.conversations.update(
            conversation.id, metadata={"topic": "piers"}
        )
        assert (
            await second_client.conversations.retrieve(conversation.id)
        ).metadata == changed.metadata
        deleted = await second_client.conversations.delete(conversation.id)
        assert deleted.deleted and deleted.object == "conversation.deleted"
        with pytest.raises(openai.NotFoundError):
            await first_client.conversations.retrieve(conversation.id)
    assert not len(first.objects.table) and not first.objects.table.objects_count()


async def test_turns_at_two_gateways_continue_conversation() -> None:
    first, second = pair(api_keys=("key",))
    async with stock_clients(first, second) as (first_client, second_client):
        conversation = await first_client.conversations.create(
            items=[{"role": "system", "content": "Be brief."}]
        )
        response = await first_client.responses.create(
            model=MODEL, input="where?", conversation=conversation.id
        )
        assert response.conversation is not None and response.conversation.id == conversation.id
        async with second_client.responses.stream(
            model=MODEL, input="when?", conversation={"id": conversation.id}, store=False
        ) as stream:
            streamed = await stream.get_final_response()
        assert streamed.conversation == response.conversation
        items = [
            item
            async for item in first_client.conversations.items.list(conversation.id, order="asc")
        ]
        assert [message_of(item) for item in items] == [
            *(("system", "Be brief."), ("user", "where?"), ("assistant", TEXT)),
            *(("user", "when?"), ("assistant", TEXT)),
        ]
        assert [items[2].id, items[4].id] == [
            answered.output[0].to_dict()["id"] for answered in (response, streamed)
        ]
        with pytest.raises(openai.NotFoundError):
            await first_client.responses.retrieve(streamed.id)  # it was not to be stored
        await first_client.conversations.delete(conversation.id)
        stored_response = await second_client.responses.retrieve(response.id)
        assert stored_response.output_text == TEXT
        following = await second_client.responses.create(
            model=MODEL, input="why?", previous_response_id=response.id
        )
        assert following.conversation is None
    requests = [*first.log.requests, *second.log.requests]
    assert {request.session_id for request in requests} == {conversation.id}
    prompts = [request.prompt_tokens for request in requests]
    assert prompts[1][: len(prompts[0])] == prompts[0], "its KV can be reused"


@pytest.mark.parametrize("kind", [OutcomeKind.FAILED, OutcomeKind.CANCELLED, OutcomeKind.SHED])
async def test_turn_without_answer_adds_nothing(kind: OutcomeKind) -> None:
    first = answering(kind=kind)
    name = await new_conversation(first, HELLO)
    await call(first, body(conversation=name), RESPONSES)
    assert await texts(second_of(first), name) == ["hello"]
    assert not first.objects.table.conversations.pending("", name)


async def test_cut_answer_is_added_as_incomplete() -> None:
    first = InProcessGateway()
    first.log.on_request = lambda request: answer(first, request, finish_reason="length")
    name = await new_conversation(first)
    await call(first, body(conversation=name), RESPONSES)
    _, page = await ask(first, f"/{name}/items")
    assert [item["status"] for item in page["data"]] == ["incomplete", "completed"]


async def test_turn_in_background_is_added_when_it_ends() -> None:
    """Turns at the same time are all added, in the order in which they began."""
    first = InProcessGateway()
    second = second_of(first)
    name = await new_conversation(first)
    for question in ("one?", "two?"):
        fields = body(question, conversation=name, background=True)
        status, response = await call(first, fields, RESPONSES)
        assert (status, response["status"]) == (200, "queued")
    assert await texts(second, name) == []
    for request in reversed(first.log.requests):
        end = stream_end(request.request_id, TEXTS)
        await first.log.push(frame(request.request_id, TEXTS, end=end))
        assert TEXT in await texts(second, name)
    assert await texts(second, name) == ["one?", TEXT, "two?", TEXT]
    assert await texts(first, name) == ["one?", TEXT, "two?", TEXT]
    await until(lambda: not first.state.calls.in_flight)


async def test_gateways_that_settle_at_once_add_items_once() -> None:
    first, second = pair()
    name = await new_conversation(first)
    await call(first, body(conversation=name), RESPONSES)
    gathered_texts = await asyncio.gather(
        *(texts(gateway, name) for gateway in (first, second) * 4)
    )
    assert gathered_texts == [["where?", TEXT]] * 8


async def test_deleted_response_leaves_its_items() -> None:
    first, second = pair()
    name = await new_conversation(first)
    _, response = await call(first, body(conversation=name), RESPONSES)
    async with second.client() as client:
        await client.delete(f"{RESPONSES}/{response['id']}")
    assert await texts(second, name) == ["where?", TEXT]


async def test_turn_that_nobody_reads_is_added_before_the_log_loses_it() -> None:
    first, second = pair()
    name = await new_conversation(first)
    await call(first, body(conversation=name), RESPONSES)
    table = first.objects.table.conversations
    (turn,) = table.pending("", name)
    await settle_overdue(second.state)
    assert table.pending("", name) == [turn], "it may be in progress"
    table.set(replace(turn, deadline_ms=1))
    await settle_overdue(second.state)
    assert not table.pending("", name)
    assert [item.item_id[:4] for item in table.items("", name)] == ["msg_", "msg_"]


async def test_deletion_during_turn_leaves_nothing() -> None:
    first = InProcessGateway()
    name = await new_conversation(first, HELLO)
    await call(first, body(conversation=name, background=True), RESPONSES)
    table = first.objects.table
    (turn,) = table.conversations.pending("", name)
    assert (await ask(first, f"/{name}", "DELETE"))[0] == 200
    assert not len(table)
    await first.objects.put(turn)  # of a gateway that did not know the deletion
    await settle_overdue(first.state)
    assert not len(table) and (await ask(first, f"/{name}"))[0] == 404


async def test_unknown_and_foreign_conversations_are_not_found() -> None:
    gateway = answering(api_keys=("alice", "bob"))
    name = await new_conversation(gateway, HELLO, key="alice")
    for path in ("", "/items", "/items/msg_1"):
        assert (await ask(gateway, f"/{name}{path}", key="bob"))[0] == 404
        assert (await ask(gateway, f"/conv_{'x' * 900}{path}", key="alice"))[0] == 404
        assert (await ask(gateway, f"/{name}{path}", key="eve"))[0] == 401
    assert (await ask(gateway, f"/{name}", "DELETE", key="bob"))[0] == 404
    assert (await ask(gateway, f"/{name}/items", "POST", key="bob", items=[HELLO]))[0] == 404
    async with gateway.client() as client:
        for key, conversation in (("bob", name), ("alice", "conv_"), ("alice", {"id": "a/b\n"})):
            response = await client.post(
                RESPONSES,
                json=body(conversation=conversation),
                headers={"authorization": f"Bearer {key}"},
            )
            assert response.status_code == 404, response.text
    assert not gateway.log.sent_records


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": 7}, "conversation"),
        ({"conversation": ["conv_1"]}, "conversation"),
        ({"conversation": {"id": 7}}, "conversation"),
        ({"conversation": {}}, "conversation"),
        ({"conversation": ""}, "conversation"),
        ({"conversation": {"id": "conv_1", "more": 1}}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
    ],
)
async def test_bad_conversation_of_response_is_refused(fields: Any, param: str) -> None:
    gateway = answering()
    status, error = await call(gateway, body(**fields), RESPONSES)
    assert (status, error["error"]["param"]) == (400, param)
    assert not gateway.log.sent_records


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": [HELLO] * 21}, "items"),
        ({"items": []}, "items"),
        ({}, "items"),
        ({"items": [{"type": "image_generation_call", "id": "x"}]}, "items.0.type"),
        ({"items": [HELLO, {"type": 7}]}, "items.1.type"),
        ({"items": [HELLO | {"role": "tool"}]}, "items.0.role"),
        ({"items": [HELLO | {"id": "a" * 257}]}, "items.0.id"),
        ({"items": [HELLO | {"id": "a"}, HELLO | {"id": "a"}]}, "items.1.id"),
        ({"items": [HELLO | {"id": "known"}]}, "items.0.id"),
        ({"items": [HELLO | {"content": "x" * (5 << 20)}]}, "items"),
        ({"items": [HELLO], "more": 1}, "more"),
        ({"items": "hello"}, "items"),
    ],
)
async def test_bad_items_are_refused(fields: Any, param: str) -> None:
    gateway = answering(body_bytes_max=16 << 20)
    name = await new_conversation(gateway, HELLO | {"id": "known"})
    status, error = await ask(gateway, f"/{name}/items", "POST", **fields)
    assert (status, error["error"]["param"]) == (400, param)
    assert await texts(gateway, name) == ["hello"]


async def test_hostile_queries_and_ids_are_refused() -> None:
    gateway = answering()
    name = await new_conversation(gateway, HELLO | {"id": "a/b\x00é"})
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=none", "include=all"):
        status, error = await ask(gateway, f"/{name}/items?{query}")
        assert (status, error["error"]["param"].removeprefix("query.")) == (
            400,
            query.partition("=")[0],
        )
    assert (await ask(gateway, f"/{name}/items/{'x' * 2_000}"))[0] == 404
    page = (await ask(gateway, f"/{name}/items?after=a/b%00%C3%A9"))[1]
    assert (page["data"], page["first_id"], page["has_more"]) == ([], "", False)
    assert (await ask(gateway, f"/{name}/items/a/b%00%C3%A9"))[1]["content"][0]["text"] == "hello"
    assert (await ask(gateway, f"/{name}/items/a%2Fb%00%C3%A9", "DELETE"))[0] == 200
    big = {"type": "reasoning", "summary": [], "size": 1 << 70}
    status, error = await ask(gateway, f"/{name}/items", "POST", items=[big])
    assert (status, error["error"]["param"]) == (400, "items")


async def test_conversation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = answering(conversations_bytes_max=4_000)
    monkeypatch.setattr(conversations, "ITEMS_MAX", 3)
    name = await new_conversation(gateway, HELLO, HELLO)
    assert (await ask(gateway, f"/{name}/items", "POST", items=[HELLO, HELLO]))[0] == 400
    status, error = await call(gateway, body([HELLO, HELLO], conversation=name), RESPONSES)
    assert (status, error["error"]["param"]) == (400, "input")
    second_name = await new_conversation(gateway)
    long = HELLO | {"content": "x" * 4_000}
    assert (await ask(gateway, f"/{second_name}/items", "POST", items=[long]))[0] == 429
    assert not gateway.log.sent_records


async def test_turns_at_same_time_are_bounded() -> None:
    gateway = InProcessGateway()
    name = await new_conversation(gateway)
    fields = body(conversation=name, background=True)
    for _ in range(conversations.PENDING_MAX):
        assert (await call(gateway, fields, RESPONSES))[0] == 200
    assert (await call(gateway, fields, RESPONSES))[0] == 429
    assert len(gateway.log.requests) == conversations.PENDING_MAX


async def test_call_ends_when_its_turn_cannot_be_kept() -> None:
    """Its request is cancelled, so it adds nothing, and the client may try again."""
    gateway = InProcessGateway()
    name = await new_conversation(gateway)

    def lose_log(_: Any) -> None:
        gateway.objects.trouble = BrokerUnavailable("away")

    gateway.log.on_request = lose_log
    assert (await call(gateway, body(conversation=name), RESPONSES))[0] == 503
    await until(lambda: len(gateway.log.cancellations) == 1)

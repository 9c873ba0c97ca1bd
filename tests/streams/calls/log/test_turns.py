"""Conversations without session ids, over several gateways that share what was said."""

import asyncio
from typing import Any

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.settings import LogSettings
from streams.calls.ids import ConversationTurn
from streams.calls.log.turns import TurnTopic
from streams.log.clients import LogProducer
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat
from tests.waits import until

CHATS = "/v1/chat/completions"


async def session_of(
    gateway: InProcessGateway, *texts: str, stream: bool = False, **headers: Any
) -> str:
    """The session of a chat in which user and assistant have said this in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    async with gateway.client() as client:
        body = chat(messages=messages, stream=stream)
        response = await client.post(CHATS, json=body, headers=headers)
    return response.headers["x-session-id"]


async def test_conversation_keeps_session_at_second_gateway() -> None:
    """No session header is needed; the session belongs to one API key."""
    keys = ("alice", "bob")
    first_gateway, second_gateway = InProcessGateway(api_keys=keys), InProcessGateway(api_keys=keys)
    for gateway in (first_gateway, second_gateway):
        gateway.answer_with("fine")
    alice, bob = (dict[str, Any](authorization=f"Bearer {name}") for name in keys)
    first = await session_of(first_gateway, "hello", stream=True, **alice)
    for turn in first_gateway.log.published_turns:
        second_gateway.state.conversations.add(turn)
    assert await session_of(second_gateway, "hello", "fine", "more", **bob) != first
    assert await session_of(second_gateway, "hello", "fine", "more", **alice) == first
    assert await session_of(second_gateway, "hello", **alice) != first, (
        "an opening belongs to nobody"
    )
    for turn in second_gateway.log.published_turns:
        first_gateway.state.conversations.add(turn)
    third = await session_of(first_gateway, "hello", "fine", "more", "fine", "on", **alice)
    assert third == first


async def test_gateway_publishes_no_turn_for_header_session_or_choices() -> None:
    """No later turn would look for it."""
    gateway = InProcessGateway()
    gateway.answer_with("fine")
    assert await session_of(gateway, "hello", **dict[str, Any]({"x-session-id": "mine"})) == "mine"
    async with gateway.client() as client:
        await client.post(CHATS, json=chat(n=2))
    assert not gateway.log.published_turns


async def test_turn_topic_reaches_current_and_later_gateways(kafka: LogSettings) -> None:
    """Every gateway reads the turns of all, as far back as configured."""
    producer = LogProducer(kafka, Codec(), durable=True, client_id="test")
    await producer.start()
    buried: list[int] = []

    async def bury(record: ConsumerRecord, error: RecordError) -> None:
        buried.append(record.offset)

    def side(name: str) -> tuple[TurnTopic, list[ConversationTurn]]:
        topic = TurnTopic(
            kafka, Codec(), gateway_id=name, back_ms=3_600_000, producer=lambda: producer, bury=bury
        )
        received_turns: list[ConversationTurn] = []
        topic.on_turn = lambda turn: received_turns.append(turn._replace(at_ms=0))
        return topic, received_turns

    (first_topic, first_turns), (second_topic, second_turns) = side("gateway-1"), side("gateway-2")
    turns = [ConversationTurn(bytes([n]) * 16, f"s{n}", 0) for n in range(4)]
    tasks = [
        asyncio.create_task(first_topic.read()),
        asyncio.create_task(first_topic.publish_pending()),
    ]
    try:
        for turn in turns[:2]:
            first_topic.publish(turn)
        await until(lambda: first_turns == turns[:2])
        await producer.send_raw(kafka.topic_prefix + "turns", b"\xc3\x01x", key=b"k", partition=0)
        tasks.append(asyncio.create_task(second_topic.read()))
        await until(lambda: second_turns == turns[:2])
        tasks.append(asyncio.create_task(second_topic.publish_pending()))
        second_topic.publish(turns[2])
        first_topic.publish(turns[3])
        await until(lambda: len(first_turns) == len(second_turns) == 4)
        assert sorted(first_turns) == sorted(second_turns) == turns
        assert buried == [1, 1], "two turns at once are one record, and each reads the bad one"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await producer.stop()

"""Conversations without session ids, over several gateways that share what was said."""

import asyncio
from typing import Any

from aiokafka import ConsumerRecord

from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.log.clients import LogProducer
from schemas.settings import LogSettings
from streams.gateway.log.turns import TurnTopic
from streams.gateway.request.conversation import ConversationTurn
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat
from tests.waiting import until

CHATS = "/v1/chat/completions"


async def session_of(
    gateway: InProcessGateway, *said: str, stream: bool = False, **headers: Any
) -> str:
    """The session of a chat in which user and assistant have said this in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
    async with gateway.client() as client:
        body = chat(messages=messages, stream=stream)
        response = await client.post(CHATS, json=body, headers=headers)
    return response.headers["x-session-id"]


async def test_a_conversation_keeps_its_session_at_another_gateway() -> None:
    """Without a session header, streamed or whole, for its own API key alone."""
    keys = ("alice", "bob")
    one, other = InProcessGateway(api_keys=keys), InProcessGateway(api_keys=keys)
    for gateway in (one, other):
        gateway.answer_with("fine")
    alice, bob = (dict[str, Any](authorization=f"Bearer {name}") for name in keys)
    first = await session_of(one, "hello", stream=True, **alice)
    for told in one.log.told:
        other.state.conversations.add(told)
    assert await session_of(other, "hello", "fine", "more", **bob) != first
    assert await session_of(other, "hello", "fine", "more", **alice) == first
    assert await session_of(other, "hello", **alice) != first, "an opening belongs to nobody"
    for told in other.log.told:
        one.state.conversations.add(told)
    third = await session_of(one, "hello", "fine", "more", "fine", "on", **alice)
    assert third == first


async def test_what_a_header_names_or_what_has_choices_is_not_told() -> None:
    """Nobody would look for it."""
    gateway = InProcessGateway()
    gateway.answer_with("fine")
    assert await session_of(gateway, "hello", **dict[str, Any]({"x-session-id": "mine"})) == "mine"
    async with gateway.client() as client:
        await client.post(CHATS, json=chat(n=2))
    assert not gateway.log.told


async def test_turns_reach_all_gateways_and_those_that_start_later(kafka: LogSettings) -> None:
    """Over the log, whoever told them, as far back as is remembered."""
    producer = LogProducer(kafka, Codec(), durable=True, client_id="test")
    await producer.start()
    buried: list[int] = []

    async def bury(record: ConsumerRecord, error: RecordError) -> None:
        buried.append(record.offset)

    def side(name: str) -> tuple[TurnTopic, list[ConversationTurn]]:
        topic = TurnTopic(
            kafka, Codec(), gateway_id=name, back_ms=3_600_000, producer=lambda: producer, bury=bury
        )
        heard: list[ConversationTurn] = []
        topic.on_turn = lambda turn: heard.append(turn._replace(at_ms=0))
        return topic, heard

    (one, to_one), (other, to_other) = side("gateway-1"), side("gateway-2")
    turns = [ConversationTurn(bytes([n]) * 16, f"s{n}", 0) for n in range(4)]
    tasks = [asyncio.create_task(one.read()), asyncio.create_task(one.publish_pending())]
    try:
        for turn in turns[:2]:
            one.publish(turn)
        await until(lambda: to_one == turns[:2])
        await producer.send_raw(kafka.topic_prefix + "turns", b"\xc3\x01x", key=b"k", partition=0)
        tasks.append(asyncio.create_task(other.read()))
        await until(lambda: to_other == turns[:2])
        tasks.append(asyncio.create_task(other.publish_pending()))
        other.publish(turns[2])
        one.publish(turns[3])
        await until(lambda: len(to_one) == len(to_other) == 4)
        assert sorted(to_one) == sorted(to_other) == turns
        assert buried == [1, 1], "two turns at once are one record, and each reads the bad one"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await producer.stop()

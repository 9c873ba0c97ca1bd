"""What is asked while processes die: in turns, with passages, hung up on."""

import asyncio
from dataclasses import replace

import pytest

from infra.bench.faults import conversation_load
from infra.bench.faults.conversation_load import FOLLOW_UPS, ConversationLoad, openings
from infra.bench.faults.http_clients import HUNG_UP, WHOLE, ChatQuestion, ClientAnswer
from tests.virtual import virtual
from tests.waiting import pass_time


class Answering:
    """Answers after a second, or never."""

    def __init__(self, *, ever: bool = True) -> None:
        self.asked: list[ChatQuestion] = []
        self._ever = ever

    async def ask(self, question: ChatQuestion) -> ClientAnswer:
        self.asked.append(question)
        if not self._ever:
            await asyncio.Event().wait()
        await pass_time(1.0)
        ended = HUNG_UP if question.read_max else WHOLE
        return ClientAnswer(client="test", status=ended, text=f"answer {len(self.asked)}")

    async def close(self) -> None:
        pass


async def asked(load: ConversationLoad, seconds: float, drain_s: float) -> int:
    running = asyncio.create_task(load.run())
    await pass_time(seconds)
    load.is_over = True
    await running
    return await load.drain(drain_s)


@virtual
async def test_conversations_arrive_at_a_rate_and_go_on_in_turns() -> None:
    client, seen = Answering(), list[ClientAnswer]()
    load = ConversationLoad(client, rate=30.0, seed=1, on_answer=seen.append)
    assert await asked(load, 20.0, 5.0) == 0
    questions = client.asked
    assert 500 < len(questions) == len(seen) < 700
    later = [each for each in questions if len(each.messages) > 1]
    assert len(later) > len(questions) / 3
    assert {each.messages[-1]["content"] for each in later} <= set(FOLLOW_UPS)
    assert {each.messages[0]["content"] for each in questions} == set(openings(1))
    told = {each.text for each in seen}
    assert all(each.messages[-2]["content"] in told for each in later)
    assert 0.2 < sum(each.retrieval is not None for each in questions) / len(questions) < 0.4
    assert 0.02 < load.status_counts[HUNG_UP] / len(questions) < 0.1
    assert all(each.read_max < each.max_tokens for each in questions)


@virtual
async def test_it_is_drawn_from_a_seed() -> None:
    clients = Answering(), Answering(), Answering()
    for client, seed in zip(clients, (1, 1, 2), strict=True):
        load = ConversationLoad(
            client, rate=30.0, seed=seed, on_answer=lambda seen: None, retrieves=0.0
        )
        await asked(load, 5.0, 5.0)
    first, same, other = (client.asked for client in clients)
    assert first == same != other
    assert not any(each.retrieval for each in first)


@virtual
async def test_what_never_ends_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_load, "UNDER_WAY_MAX", 20)
    load = ConversationLoad(Answering(ever=False), rate=30.0, seed=1, on_answer=lambda seen: None)
    assert await asked(load, 5.0, 1.0) == 20
    assert load.left_out > 80


def test_a_body_says_what_is_asked() -> None:
    plain = ChatQuestion(messages=[{"role": "user", "content": "?"}], max_tokens=3, read_max=2)
    assert "retrieval" not in plain.body("m", stream=True)
    assert "read_max" not in plain.body("m", stream=True)
    asking = replace(plain, retrieval={"collection": "c"})
    assert asking.body("m", stream=False)["retrieval"] == {"collection": "c"}
    assert "stream" not in asking.body("m", stream=False)

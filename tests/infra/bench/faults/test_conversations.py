"""What is asked while processes die: in turns, with passages, hung up on."""

import asyncio
from dataclasses import replace

import pytest

from infra.bench.faults import conversations
from infra.bench.faults.conversations import FOLLOW_UPS, ConversationLoad, openings
from infra.bench.faults.http_clients import HUNG_UP, WHOLE, ChatQuestion, ClientAnswer
from tests.virtual_time import virtual
from tests.waits import pass_time


class Answering:
    """Answers after a second, or never."""

    def __init__(self, *, ever: bool = True) -> None:
        self.questions: list[ChatQuestion] = []
        self._ever = ever

    async def ask(self, question: ChatQuestion) -> ClientAnswer:
        self.questions.append(question)
        if not self._ever:
            await asyncio.Event().wait()
        await pass_time(1.0)
        status = HUNG_UP if question.read_max else WHOLE
        return ClientAnswer(client="test", status=status, text=f"answer {len(self.questions)}")

    async def close(self) -> None:
        pass


async def run_load(load: ConversationLoad, seconds: float, drain_s: float) -> int:
    running = asyncio.create_task(load.run())
    await pass_time(seconds)
    load.is_over = True
    await running
    return await load.drain(drain_s)


@virtual
async def test_conversation_load_arrives_at_rate_and_continues_in_turns() -> None:
    client, answers = Answering(), list[ClientAnswer]()
    load = ConversationLoad(client, rate=30.0, seed=1, on_answer=answers.append)
    assert await run_load(load, 20.0, 5.0) == 0
    questions = client.questions
    assert 500 < len(questions) == len(answers) < 700
    later = [question for question in questions if len(question.messages) > 1]
    assert len(later) > len(questions) / 3
    assert {question.messages[-1]["content"] for question in later} <= set(FOLLOW_UPS)
    assert {question.messages[0]["content"] for question in questions} == set(openings(1))
    texts = {answer.text for answer in answers}
    assert all(question.messages[-2]["content"] in texts for question in later)
    assert (
        0.2 < sum(question.retrieval is not None for question in questions) / len(questions) < 0.4
    )
    assert 0.02 < load.status_counts[HUNG_UP] / len(questions) < 0.1
    assert all(question.read_max < question.max_tokens for question in questions)


@virtual
async def test_conversation_load_repeats_by_seed() -> None:
    clients = Answering(), Answering(), Answering()
    for client, seed in zip(clients, (1, 1, 2), strict=True):
        load = ConversationLoad(
            client, rate=30.0, seed=seed, on_answer=lambda answer: None, retrieves=0.0
        )
        await run_load(load, 5.0, 5.0)
    first, same, other_seed = (client.questions for client in clients)
    assert first == same != other_seed
    assert not any(question.retrieval for question in first)


@virtual
async def test_conversation_load_limits_open_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "UNDER_WAY_MAX", 20)
    load = ConversationLoad(Answering(ever=False), rate=30.0, seed=1, on_answer=lambda answer: None)
    assert await run_load(load, 5.0, 1.0) == 20
    assert load.left_out > 80


def test_question_body_contains_retrieval_only_if_set() -> None:
    plain = ChatQuestion(messages=[{"role": "user", "content": "?"}], max_tokens=3, read_max=2)
    assert "retrieval" not in plain.body("m", stream=True)
    assert "read_max" not in plain.body("m", stream=True)
    asking = replace(plain, retrieval={"collection": "c"})
    assert asking.body("m", stream=False)["retrieval"] == {"collection": "c"}
    assert "stream" not in asking.body("m", stream=False)

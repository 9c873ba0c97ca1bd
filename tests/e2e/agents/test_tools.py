"""Agents' loops of tool calls with the stock client, while the workers that answer are killed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import cycle, zip_longest
from typing import Any

import pytest
from openai import AsyncOpenAI

from infra.stack.launcher import Stack
from tests.conftest import _fresh_topics
from tests.e2e.harness import met, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waits import PATIENCE_S
from workers.llm.sim.settings import SCRIPT_MARKS

pytestmark = [pytest.mark.kafka, pytest.mark.vllm, pytest.mark.timeout(1_800)]
CITIES = ("Oslo", "Rome", "Lima")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS, LOOPS, LOOPS_AT_ONCE, KILL_EVERY_S = 5, 200, 8, 4.0
THOUGHT = " ".join(["I have to look at the weather of each city before I can answer."] * 4)


def scripted(text: str) -> str:
    """What makes the simulated engine answer with a text."""
    return text.join(SCRIPT_MARKS)


def calling(city: str) -> str:
    """An answer of the model: it reasons, says something, and calls the tool."""
    arguments = json.dumps({"city": city, "days": [*range(80)]})
    call = f'{{"name": "get_weather", "arguments": {arguments}}}'
    return f"{THOUGHT}</think>Looking at {city}.<tool_call>\n{call}\n</tool_call>"


@dataclass
class StreamedTurn:
    """A streamed answer of a chat, as its client adds it up."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str = ""
    usage: Any = None
    attempt: int = 0

    def add(self, chunk: Any) -> None:
        self.usage = chunk.usage or self.usage
        self.attempt = getattr(chunk, "trivium", {}).get("attempt", self.attempt)
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            self.content += choice.delta.content or ""
            self.reasoning += getattr(choice.delta, "reasoning", None) or ""
            for delta in choice.delta.tool_calls or ():
                if delta.id:
                    assert delta.index not in self.calls
                    self.calls[delta.index] = {"id": delta.id, "arguments": ""}
                self.calls[delta.index]["arguments"] += delta.function.arguments or ""

    @property
    def message(self) -> Any:
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": "get_weather", "arguments": call["arguments"]},
            }
            for call in self.calls.values()
        ]
        text = {"role": "assistant", "content": self.content, "reasoning": self.reasoning}
        return {**text, "tool_calls": calls} if calls else text

    @property
    def read(self) -> Any:
        """All of it but the ids, which each call has its own."""
        arguments = [call["arguments"] for call in self.calls.values()]
        counts = (self.usage.completion_tokens, self.usage.completion_tokens_details)
        return self.content, self.reasoning, arguments, self.finish_reason, counts


When = Callable[[StreamedTurn], bool]


@pytest.fixture(scope="module")
async def running(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    settings = sim_settings(await _fresh_topics(bootstrap), scripted=True, decode_step_ms=4.0)
    model = replace(
        settings.model, max_model_len=16_384, tool_parser="hermes", reasoning_parser="qwen3"
    )
    settings = replace(settings, model=model)
    folder = tmp_path_factory.mktemp("tools")
    async with stack(settings, folder, lease_ms=BRIEF_LEASE_MS, prefill=1, decode=2) as started:
        yield started


def client_of(running: Stack) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{running.gateway_urls[0]}/v1", api_key="x", timeout=PATIENCE_S, max_retries=0
    )


async def streamed(
    running: Stack, client: AsyncOpenAI, messages: Any, kill_when: When | None = None
) -> StreamedTurn:
    """Stream a turn; kill the worker that generates it, once."""
    turn = StreamedTurn()
    response = await client.chat.completions.with_raw_response.create(
        model="sim",
        messages=messages,
        tools=[TOOL],
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in response.parse():
        turn.add(chunk)
        if kill_when is not None and kill_when(turn):
            kill_when = None
            await running.kill(response.headers["x-trivium-decode-worker"])
    return turn


async def loop_of_calls(running: Stack, *kills: When) -> list[StreamedTurn]:
    """An agent's loop: the result of each call has what the model says next."""
    client, turns = client_of(running), list[StreamedTurn]()
    answers = [*map(calling, CITIES), f"{THOUGHT}</think>All are fine."]
    messages: list[Any] = [{"role": "user", "content": scripted(answers[0])}]
    for number, kill_when in zip_longest(range(len(answers)), kills):
        await running.wait_ready()
        await met(running)
        turn = await streamed(running, client, messages, kill_when)
        turns.append(turn)
        messages.append(turn.message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": scripted(answers[number + 1])}
            for call in turn.calls.values()
        ]
    await client.close()
    return turns


async def test_loop_of_tool_calls_is_the_same_while_workers_are_killed(running: Stack) -> None:
    """In the reasoning, in the content, and in the arguments of a call."""
    quiet = await loop_of_calls(running)
    arguments = [json.loads(turn.calls[0]["arguments"])["city"] for turn in quiet[:-1]]
    assert (arguments, quiet[-1].content) == ([*CITIES], "All are fine.")
    assert {turn.reasoning for turn in quiet} == {THOUGHT}
    assert [turn.finish_reason for turn in quiet] == [*["tool_calls"] * len(CITIES), "stop"]
    killed = await loop_of_calls(
        running,
        lambda turn: len(turn.reasoning) > 50,
        lambda turn: bool(turn.content),
        lambda turn: bool(turn.calls) and len(turn.calls[0]["arguments"]) > 30,
    )
    assert [turn.read for turn in killed] == [turn.read for turn in quiet]
    assert [turn.attempt > 1 for turn in killed] == [True, True, True, False]


async def test_whole_answer_has_what_its_stream_has(running: Stack) -> None:
    await met(running)
    client = client_of(running)
    text = calling("Oslo").replace("</tool_call>", f"</tool_call>{calling('Rome')[-200:]}")
    messages: Any = [{"role": "user", "content": scripted(text)}]
    turn = await streamed(running, client, messages)
    whole = await client.chat.completions.create(model="sim", messages=messages, tools=[TOOL])
    (choice,) = whole.choices
    calls: Any = choice.message.tool_calls
    assert (choice.message.content or "") == turn.content
    assert [call.function.arguments for call in calls] == turn.read[2]
    choice_by_name: Any = {"type": "function", "function": {"name": "get_weather"}}
    for tool_choice in ("required", choice_by_name):
        forced = await client.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": "Hello"}],
            tools=[TOOL],
            tool_choice=tool_choice,
        )
        message: Any = forced.choices[0].message
        json.loads(message.tool_calls[0].function.arguments)
    await client.close()


async def looped(running: Stack, number: int) -> int:
    """Run one agent's loop of calls, each with arguments of its own; return its attempts."""
    client, attempts = client_of(running), 0
    cities = [f"{CITIES[call % 3]} {number}.{call}" for call in range(CALLS)]
    answers = [*map(calling, cities), f"{THOUGHT}</think>All {number} are fine."]
    messages: list[Any] = [{"role": "user", "content": scripted(answers[0])}]
    for city, after in zip(cities, answers[1:], strict=True):
        turn = await streamed(running, client, messages)
        attempts += turn.attempt
        assert (turn.content, turn.reasoning) == (f"Looking at {city}.", THOUGHT)
        (call,) = turn.calls.values()
        assert json.loads(call["arguments"]) == {"city": city, "days": [*range(80)]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": scripted(after)}
        messages += [turn.message, result]
    last = await streamed(running, client, messages)
    assert (last.content, last.finish_reason) == (f"All {number} are fine.", "stop")
    await client.close()
    return attempts + last.attempt


@pytest.mark.slow
async def test_many_loops_lose_nothing_under_kills(running: Stack) -> None:
    """Every few seconds a worker or a router dies, whichever comes next."""
    await running.wait_ready()
    await met(running)
    victims = cycle(["decode-0", "router-0", "decode-1", "prefill-0"])
    waiting = list(range(LOOPS))
    attempts = kills = 0

    async def loops() -> None:
        nonlocal attempts
        while waiting:
            attempts += await looped(running, waiting.pop())

    running_loops = asyncio.gather(*(loops() for _ in range(LOOPS_AT_ONCE)))
    while not running_loops.done():
        await asyncio.wait([running_loops], timeout=KILL_EVERY_S)
        await running.wait_ready()
        await running.kill(next(victims))
        kills += 1
    await running_loops
    assert kills > LOOPS // 20
    assert attempts > LOOPS * (CALLS + 1)

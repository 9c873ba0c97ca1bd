"""Agents over topics and in batches: simulated engines say what the prompt tells them, and workers
parse it with vLLM's own parsers."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message

from schemas.settings import LogSettings
from streams.bridge.config import BridgeSettings, TopicPair
from streams.log.admin import create_extra_topics
from streams.openai.batches.lines import MESSAGES
from tests.e2e.bridge.test_batches import (
    call,
    client,
    create_batch,
    results,
    wait_for_batch,
)
from tests.e2e.bridge.topics import AnswerReader, Sent, produce
from tests.e2e.harness import sim_settings, stack
from tests.waits import until
from workers.llm.sim.settings import SCRIPT_MARKS

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]
KEPT_MS, TURNS, LINES = 3_600_000, 12, 200
TOOLS: Any = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}},
]


def question_for(text: str) -> dict[str, str]:
    """A question whose answer is this text."""
    return {"role": "user", "content": f"Say {SCRIPT_MARKS[0]}{text}{SCRIPT_MARKS[1]}"}


def calling(path: str) -> str:
    """Reasoning and a call, as models of Hermes' kind write them."""
    called = {"name": "read", "arguments": {"path": path}}
    return f"I look.\n</think>\n\n<tool_call>\n{json.dumps(called)}\n</tool_call>"


async def test_tool_loops_over_topics_and_in_batches(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """A bridge, a worker and a gateway die meanwhile. Each turn has one answer, and the form of the
    pair binds only answers without a call."""
    log = await kafka_with(gateway_partitions=4)
    names = [log.topic_prefix + name for name in ("agents", "agents.answers", "agents.parts")]
    await create_extra_topics(log, dict.fromkeys(names, KEPT_MS))
    prompts, answers, parts = names
    pair = TopicPair(
        prompts=prompts,
        answers=answers,
        parts=parts,
        tools=json.dumps(TOOLS),
        schema='{"type": "integer"}',
        body=True,
    )
    settings = sim_settings(log, scripted=True, decode_step_ms=2.0)
    model = replace(
        settings.model, tool_parser="hermes", reasoning_parser="qwen3", max_model_len=4_096
    )
    settings = replace(settings, model=model, bridge=BridgeSettings(pairs=(pair,)))
    sent_prompts = Sent()
    talks: dict[str, list[Any]] = {
        f"k{n}": [question_for(calling(f"file-{n}"))] for n in range(TURNS)
    }
    async with (
        stack(settings, tmp_path, replica=2, gateways=2, bridges=1) as running,
        AnswerReader(log, answers) as reader,
        AnswerReader(log, parts) as pieces,
    ):
        await produce(log, prompts, prompts_of(talks), sent_prompts)
        await running.kill("bridge-0")
        await running.kill("replica-0")
        read = await reader.until(TURNS)
        for place, (answer,) in list(read.values.items()):
            key = sent_prompts.keys[place]
            number = key.removeprefix("k")
            (tool_call,) = answer["tool_calls"]
            assert json.loads(tool_call["function"]["arguments"]) == {"path": f"file-{number}"}
            assert (answer["finish_reason"], answer["parsed"]) == ("tool_calls", None)
            assert answer["reasoning"].strip() == "I look." and answer["reasoning_tokens"] > 0
            (choice,) = answer["body"]["choices"]
            assert choice["message"]["tool_calls"] == answer["tool_calls"]
            turn = {"role": "assistant", "content": answer["text"], "tool_calls": [tool_call]}
            result = question_for(f"</think>\n\n{number}")["content"]
            tool_turn = {"role": "tool", "tool_call_id": tool_call["id"], "content": result}
            talks[key] += [turn, tool_turn]
        await produce(log, prompts, prompts_of(talks), sent_prompts)
        read = await reader.until(2 * TURNS)
        finals = {
            sent_prompts.keys[place]: answer["parsed"]
            for place, (answer,) in read.values.items()
            if answer["tool_calls"] is None
        }
        assert finals == {f"k{n}": n for n in range(TURNS)}
        assert set(read.counts) == {1}
        while len(pieces.read.values) < 2 * TURNS or any(
            not row[-1]["finish_reason"] for row in pieces.read.values.values()
        ):
            await pieces.read_more()
        for place, (answer,) in read.values.items():
            assert arguments_in(pieces.read.values[place]) == [
                tool_call["function"]["arguments"] for tool_call in answer["tool_calls"] or ()
            ]
        await check_batch_of_messages(running)
        await check_batch(running)


def prompts_of(talks: dict[str, list[Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (key, {"messages": messages, "max_tokens": 400, "temperature": 0})
        for key, messages in talks.items()
    ]


def arguments_in(parts: list[Any]) -> list[str]:
    """The arguments of the calls that the parts of an answer carry; repeats count once."""
    calls: dict[int, str] = {}
    for part in sorted(
        {part["seq"]: part for part in parts}.values(), key=lambda part: part["seq"]
    ):
        for piece in part["tool_calls"] or ():
            before = calls.get(piece["index"], "")
            calls[piece["index"]] = before + piece["function"]["arguments"]
    return list(calls.values())


async def check_batch(running: Any) -> None:
    """Check that each line of a batch has its call, though the gateway that runs it dies."""
    lines = [
        call(
            number,
            model=running.settings.model.served_name,
            messages=[question_for(calling(f"line-{number}"))],
            tools=TOOLS,
            tool_choice="auto",
            max_tokens=400,
        )
        for number in range(LINES)
    ]
    async with client(running, 0) as first:
        batch = await create_batch(first, lines)

        async def is_under_way() -> bool:
            counts = (await first.batches.retrieve(batch.id)).request_counts
            return counts is not None and counts.completed > 0

        await until(is_under_way)
        await running.kill("gateway-0")
    async with client(running, 1) as second:
        finished_batch = await wait_for_batch(second, batch.id)
        assert finished_batch.request_counts.completed == LINES
        answers = await results(second, finished_batch.output_file_id)
    paths = {}
    for answer in answers:
        (choice,) = answer["response"]["body"]["choices"]
        (tool_call,) = choice["message"]["tool_calls"]
        paths[answer["custom_id"]] = json.loads(tool_call["function"]["arguments"])["path"]
        assert choice["finish_reason"] == "tool_calls"
    assert paths == {f"c{number}": f"line-{number}" for number in range(LINES)}


async def check_batch_of_messages(running: Any) -> None:
    """Check that lines in Anthropic's form are answered in it, and that a refused one says why."""
    lines = [
        call(
            number,
            url=MESSAGES,
            model=running.settings.model.served_name,
            messages=[question_for(calling(f"line-{number}"))],
            tools=[{"name": "read", "input_schema": {"type": "object"}}],
            thinking={"type": "enabled", "budget_tokens": 64},
            max_tokens=400,
        )
        for number in range(3)
    ]
    lines.append(call(3, url=MESSAGES, model=running.settings.model.served_name, n=2))
    async with client(running, 0) as ai:
        batch = await create_batch(ai, lines, MESSAGES)
        finished_batch = await wait_for_batch(ai, batch.id)
        answers = await results(ai, finished_batch.output_file_id)
        (refused,) = await results(ai, finished_batch.error_file_id)
    inputs = {}
    for answer in answers:
        message = Message.model_validate(answer["response"]["body"])
        (tool_use,) = [block for block in message.content if block.type == "tool_use"]
        assert (message.content[0].type, message.stop_reason) == ("thinking", "tool_use")
        inputs[answer["custom_id"]] = tool_use.input
    assert inputs == {f"c{number}": {"path": f"line-{number}"} for number in range(3)}
    response = refused["response"]
    assert (response["status_code"], response["body"]["type"]) == (400, "error")
    assert response["body"]["error"]["message"].startswith("n: ")

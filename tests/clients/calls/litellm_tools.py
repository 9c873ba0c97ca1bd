"""litellm with tools: loops of calls, whole and streamed, over chats, responses and messages;
several calls at once, a forced one, and reasoning.
"""

import asyncio
import json
import sys
from typing import Any

import litellm
from loops import ALL, LAST, MODEL, TURNS, answer_script, calls_text, script

URL = sys.argv[1] + "/v1"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read_file", "description": "Read a file.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


def loop_chats(options: dict[str, Any], *, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": script(0)}]
    paths, thoughts = [], []
    while True:
        answer = litellm.completion(messages=messages, tools=[TOOL], stream=stream, **options)
        if stream:
            parts = list(answer)
            answer = litellm.stream_chunk_builder(parts, messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        thoughts.append(message.reasoning_content.strip())
        if not message.tool_calls:
            break
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            path = json.loads(call.function.arguments)["path"]
            paths.append(path)
            text = script(int(path) + 1)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    assert message.content.strip() == LAST and paths == ALL, (message, paths)
    assert thoughts == [*(f"Step {turn}." for turn in range(TURNS)), "All read."], thoughts


def calls_of_one_turn(options: dict[str, Any]) -> None:
    two = answer_script(
        "Both. " + calls_text(("read_file", {"path": "a"}), ("read_file", {"path": "b"}))
    )
    messages = [{"role": "user", "content": two}]
    whole = litellm.completion(messages=messages, tools=[TOOL], **options).choices[0].message
    parts = list(litellm.completion(messages=messages, tools=[TOOL], stream=True, **options))
    built = litellm.stream_chunk_builder(parts, messages=messages).choices[0].message
    for message in (whole, built):
        arguments = [json.loads(call.function.arguments) for call in message.tool_calls]
        assert arguments == [{"path": "a"}, {"path": "b"}] and message.content.strip() == "Both."
    choice = {"type": "function", "function": {"name": "read_file"}}
    for tool_choice in ("required", choice):
        forced = litellm.completion(
            messages=[{"role": "user", "content": "Which?"}],
            tools=[TOOL],
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            **options,
        )
        (call,) = forced.choices[0].message.tool_calls
        assert call.function.name == "read_file"


def loop_responses() -> None:
    options = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "x"}
    items: list[Any] = [{"role": "user", "content": script(0)}]
    tools = [{"type": "function", **FUNCTION}]
    for turn in range(TURNS):
        answer = litellm.responses(input=items, tools=tools, **options)
        (call,) = (item for item in answer.output if item.type == "function_call")
        assert json.loads(call.arguments) == {"path": str(turn)}
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        result = script(turn + 1)
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    assert litellm.responses(input=items, tools=tools, **options).output_text.strip() == LAST


async def loop_messages(provider: str, base: str) -> None:
    """Anthropic's form in; towards the gateway that of the provider."""
    options = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "x", "max_tokens": 400}
    options["thinking"] = {"type": "enabled", "budget_tokens": 1_024}
    tools = [{"name": "read_file", "description": "Read a file.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": script(0)}]
    for turn in range(TURNS + 1):
        answer = await litellm.anthropic_messages(messages=messages, tools=tools, **options)
        blocks = answer["content"]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if not calls:
            break
        assert [call["input"] for call in calls] == [{"path": str(turn)}], calls
        result = {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": script(turn + 1)}
        messages += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
        ]
    assert turn == TURNS and blocks[-1]["text"].strip() == LAST, blocks


for provider in ("openai", "hosted_vllm"):
    served = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": "x"}
    for stream in (False, True):
        loop_chats(served, stream=stream)
    calls_of_one_turn(served)
loop_responses()
asyncio.run(loop_messages("anthropic", sys.argv[1]))

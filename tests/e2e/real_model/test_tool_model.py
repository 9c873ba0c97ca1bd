"""A real model that calls tools, asked with the real OpenAI client.

The model, Qwen2.5-Coder-0.5B-Instruct, finds the right tool and its arguments, but does not write a
call in the form that its template asks for, and calls again after a result. So each call is asked
for by `tool_choice`, which binds its form.
"""

import json
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import pytest
from openai import AsyncOpenAI

from infra.stack.launcher import Stack
from tests.conftest import _fresh_topics
from tests.e2e.real_model.stack import real_stack
from workers.models.wheels import QWEN_CODER, WHEELS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.vllm,
    pytest.mark.timeout(2_400),
    pytest.mark.skipif(
        find_spec(WHEELS[QWEN_CODER].modules[0]) is None,
        reason="a model that calls tools is not installed; `make tool-model` does it",
    ),
]

Json = dict[str, Any]


def tool(name: str, description: str, **properties: str) -> Json:
    """A tool whose arguments have these types, and are all required."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": [*properties],
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS: Any = [
    tool("get_weather", "Get the current weather of a city", city="string"),
    tool("add", "Add two integers", a="integer", b="integer"),
    tool("search_files", "Search files by a name pattern", pattern="string"),
]
CASES: dict[str, tuple[str, Json]] = {
    "What is the weather in Rome?": ("get_weather", {"city": "Rome"}),
    "What is 17 plus 25?": ("add", {"a": 17, "b": 25}),
    "Find all files named *.py": ("search_files", {"pattern": "*.py"}),
}


@pytest.fixture(scope="module")
async def running(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    log = await _fresh_topics(bootstrap)
    folder = tmp_path_factory.mktemp("tools")
    async with real_stack(log, folder, QWEN_CODER, replica=1) as running_stack:
        yield running_stack


@pytest.fixture
async def client(running: Stack) -> AsyncIterator[AsyncOpenAI]:
    url = f"{running.gateway_urls[0]}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=600) as openai_client:
        yield openai_client


async def ask(client: AsyncOpenAI, messages: Any, **fields: Any) -> Any:
    """The choice of one answer."""
    options: Json = {"model": QWEN_CODER, "temperature": 0, "max_tokens": 64, **fields}
    answer = await client.chat.completions.create(messages=messages, **options)
    return answer.choices[0]


async def test_model_calls_tool_that_fits_question(client: AsyncOpenAI) -> None:
    for question, (name, arguments) in CASES.items():
        messages = [{"role": "user", "content": question}]
        choice = await ask(client, messages, tools=TOOLS, tool_choice="required")
        (call,) = choice.message.tool_calls
        assert call.function.name == name
        assert json.loads(call.function.arguments) == arguments
        assert choice.finish_reason == "tool_calls"


async def test_model_calls_next_tool_after_result(client: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 17 plus 25?"}]
    chosen = {"type": "function", "function": {"name": "add"}}
    choice = await ask(client, messages, tools=TOOLS, tool_choice=chosen)
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 17, "b": 25}
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
        {"role": "user", "content": "And what is the weather in Paris?"},
    ]
    choice = await ask(client, messages, tools=TOOLS, tool_choice="required")
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


async def test_deployment_tells_parsers_of_model(client: AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.model_extra or {})["tool_parser"] == "hermes"
    assert (model.model_extra or {})["reasoning_parser"] == "none"

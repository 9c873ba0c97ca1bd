"""pydantic-ai: loops of calls, whole, streamed and step by step; output that is a tool or a form
beside tools; with chats and with responses.
"""

import asyncio
import sys

from loops import ALL, LAST, MODEL, TURNS, Pier, answer_script, calls_text, paths, read_file, script
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def read_form(path: str) -> str:
    """Read a file that says what the form is."""
    paths.append(path)
    return answer_script('{"pier": 7}')


def thought_of(part: ThinkingPart) -> str:
    """Return the text of reasoning, which responses have apart from its summary."""
    raw_texts = (part.provider_details or {}).get("raw_content", ())
    return (part.content or "".join(raw_texts)).strip()


async def loop(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    agent = Agent(model, tools=[read_file], instructions="Read all of them.")
    whole = await agent.run(script(0))
    assert whole.output.strip() == LAST and paths == ALL, (whole.output, paths)
    parts = [part for message in whole.all_messages() for part in message.parts]
    assert len([part for part in parts if isinstance(part, ToolCallPart)]) == TURNS
    thoughts = [thought_of(part) for part in parts if isinstance(part, ThinkingPart)]
    assert thoughts == [*(f"Step {turn}." for turn in range(TURNS)), "All read."], thoughts
    assert whole.usage.tool_calls == TURNS and whole.usage.output_tokens > 0
    paths.clear()
    history = whole.all_messages()
    assert (
        await agent.run(answer_script("Here."), message_history=history)
    ).output.strip() == "Here."
    async with agent.run_stream(script(0)) as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)]).strip() == LAST
    assert paths == ALL
    paths.clear()


async def form(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    """A form beside tools: a call first, then the answer in its form."""
    first = answer_script(calls_text(("read_form", {"path": "a"})))
    native = Agent(model, tools=[read_form], output_type=NativeOutput(Pier))
    assert (await native.run(first)).output == Pier(pier=7)
    by_tool = Agent(model, tools=[read_form], output_type=ToolOutput(Pier, name="pier"))
    answer = answer_script(calls_text(("pier", {"pier": 8})))
    assert (await by_tool.run(answer)).output == Pier(pier=8)
    async with by_tool.run_stream(answer) as stream:
        assert [output async for output in stream.stream_output()][-1] == Pier(pier=8)
    paths.clear()


async def main() -> None:
    provider = OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="x")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        await loop(model)
        await form(model)


asyncio.run(main())

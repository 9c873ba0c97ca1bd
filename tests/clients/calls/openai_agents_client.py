"""OpenAI's Agents SDK: loops of calls over responses, whole and streamed, and over chats."""

import asyncio
import json
import sys

from agents import (
    Agent,
    CustomTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

MODEL, TURNS = "sim", 5
OPEN, CLOSE = "⟦", "⟧"  # between them: what the engine answers


def script(turn: int, name: str = "read_file") -> str:
    """What makes the engine reason and call in this turn, and answer after the last one."""
    if turn == TURNS:
        return f"{OPEN}All read.\n</think>\n\nDone after {TURNS}.{CLOSE}"
    arguments = {"path": str(turn)} if name == "read_file" else {"input": f'a "{turn}"\n'}
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{OPEN}Step {turn}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>{CLOSE}"


paths: list[str] = []
patches: list[str] = []


@function_tool
def read_file(path: str) -> str:
    """Read a file."""
    paths.append(path)
    return script(int(path) + 1)


async def apply(_: object, text: str) -> str:
    """Apply a patch."""
    patches.append(text)
    return script(len(patches), "patch")


patch = CustomTool(name="patch", description="Applies a patch.", on_invoke_tool=apply)
settings = ModelSettings(temperature=0, parallel_tool_calls=True, include_usage=True)
quiet = RunConfig(tracing_disabled=True)


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="x", max_retries=0)
    responses = OpenAIResponsesModel(model=MODEL, openai_client=client)
    chats = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    for model in (responses, chats):
        agent = Agent(name="reader", model=model, tools=[read_file], model_settings=settings)
        whole = await Runner.run(agent, script(0), run_config=quiet)
        assert whole.final_output.strip() == f"Done after {TURNS}.", whole.final_output
        assert paths == [str(turn) for turn in range(TURNS)], paths
        paths.clear()
        streamed = Runner.run_streamed(agent, script(0), run_config=quiet)
        kinds = [
            event.data.type async for event in streamed.stream_events() if hasattr(event, "data")
        ]
        assert streamed.final_output.strip() == f"Done after {TURNS}."
        assert kinds.count("response.completed") == TURNS + 1
        assert "response.function_call_arguments.delta" in kinds
        assert len(paths) == TURNS
        paths.clear()
    agent = Agent(name="reader", model=responses, tools=[read_file], model_settings=settings)
    by_id = await Runner.run(agent, script(0), run_config=quiet, auto_previous_response_id=True)
    assert by_id.final_output.strip() == f"Done after {TURNS}."
    assert by_id.context_wrapper.usage.output_tokens_details.reasoning_tokens > 0
    patcher = Agent(name="patcher", model=responses, tools=[patch], model_settings=settings)
    patched = await Runner.run(patcher, script(0, "patch"), run_config=quiet)
    assert patched.final_output.strip() == f"Done after {TURNS}."
    assert patches == [f'a "{turn}"\n' for turn in range(TURNS)], patches


asyncio.run(main())

"""OpenAI's Agents SDK: loops of calls over responses, whole and streamed, and over chats."""

import asyncio
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
from loops import ALL, LAST, MODEL, TURNS, answer_script, calls_text, paths, read_file, script
from openai import AsyncOpenAI


def patch_script(turn: int) -> str:
    """What makes the engine write the next patch in this turn, and answer after the last one."""
    return answer_script(
        LAST if turn == TURNS else calls_text(("patch", {"input": f'a "{turn}"\n'}))
    )


patches: list[str] = []


async def apply(_: object, text: str) -> str:
    """Apply a patch."""
    patches.append(text)
    return patch_script(len(patches))


reader = function_tool(read_file)
patch = CustomTool(name="patch", description="Applies a patch.", on_invoke_tool=apply)
settings = ModelSettings(temperature=0, parallel_tool_calls=True, include_usage=True)
quiet = RunConfig(tracing_disabled=True)


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="x", max_retries=0)
    responses = OpenAIResponsesModel(model=MODEL, openai_client=client)
    chats = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    for model in (responses, chats):
        agent = Agent(name="reader", model=model, tools=[reader], model_settings=settings)
        whole = await Runner.run(agent, script(0), run_config=quiet)
        assert whole.final_output.strip() == LAST, whole.final_output
        assert paths == ALL, paths
        paths.clear()
        streamed = Runner.run_streamed(agent, script(0), run_config=quiet)
        kinds = [
            event.data.type async for event in streamed.stream_events() if hasattr(event, "data")
        ]
        assert streamed.final_output.strip() == LAST
        assert kinds.count("response.completed") == TURNS + 1
        assert "response.function_call_arguments.delta" in kinds
        assert len(paths) == TURNS
        paths.clear()
    agent = Agent(name="reader", model=responses, tools=[reader], model_settings=settings)
    by_id = await Runner.run(agent, script(0), run_config=quiet, auto_previous_response_id=True)
    assert by_id.final_output.strip() == LAST
    assert by_id.context_wrapper.usage.output_tokens_details.reasoning_tokens > 0
    patcher = Agent(name="patcher", model=responses, tools=[patch], model_settings=settings)
    patched = await Runner.run(patcher, patch_script(0), run_config=quiet)
    assert patched.final_output.strip() == LAST
    assert patches == [f'a "{turn}"\n' for turn in range(TURNS)], patches


asyncio.run(main())

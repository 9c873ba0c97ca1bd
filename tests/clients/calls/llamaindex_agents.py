"""LlamaIndex: agents that call functions or write ReAct steps, whole and streamed; calls of one
turn; answers in a form that is a tool.
"""

import asyncio
import sys

from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from loops import ALL, LAST, MODEL, Pier, answer_script, calls_text, paths, read_file, script


def read_step(path: str) -> str:
    """Read a file, for an agent that writes its steps as text."""
    paths.append(path)
    return answer_script(f"Thought: I can answer without using any more tools.\nAnswer: {LAST}")


llm = OpenAILike(
    model=MODEL,
    api_base=sys.argv[1] + "/v1",
    api_key="x",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8_192,
    max_retries=0,
)
tool = FunctionTool.from_defaults(read_file)


async def run_function_agents() -> None:
    for streaming in (True, False):
        agent = FunctionAgent(tools=[tool], llm=llm, streaming=streaming)
        handler = agent.run(script(0), memory=ChatMemoryBuffer.from_defaults(token_limit=6_000))
        results, text = [], ""
        async for event in handler.stream_events():
            if isinstance(event, ToolCallResult):
                results.append(event.tool_kwargs["path"])
            elif isinstance(event, AgentStream) and not event.tool_calls:
                text += event.delta
        assert str(await handler).strip() == LAST
        assert results == paths == ALL, (results, paths)
        assert text.strip() in (LAST, ""), text
        paths.clear()


async def run_react_agent() -> None:
    """Its calls are text, which no parser may take for calls."""
    step = 'Thought: I need to use a tool.\nAction: read_step\nAction Input: {"path": "a"}'
    agent = ReActAgent(tools=[FunctionTool.from_defaults(read_step)], llm=llm)
    assert str(await agent.run(answer_script(step))).strip() == LAST
    assert paths == ["a"]
    paths.clear()


async def call_tools() -> None:
    two = answer_script(
        "Both. " + calls_text(("read_file", {"path": "0"}), ("read_file", {"path": "1"}))
    )
    answer = await llm.achat_with_tools([tool], user_msg=two, allow_parallel_tool_calls=True)
    tool_calls = llm.get_tool_calls_from_response(answer)
    assert [call.tool_kwargs for call in tool_calls] == [{"path": "0"}, {"path": "1"}]
    stream = await llm.astream_chat_with_tools([tool], user_msg=two, allow_parallel_tool_calls=True)
    *_, last = [part async for part in stream]
    tool_calls = llm.get_tool_calls_from_response(last)
    assert [call.tool_kwargs for call in tool_calls] == [{"path": "0"}, {"path": "1"}]
    forced = await llm.achat_with_tools([tool], user_msg="Which?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(forced)
    assert call.tool_name == "read_file"
    formed = llm.as_structured_llm(Pier).complete(answer_script(calls_text(("Pier", {"pier": 7}))))
    assert formed.raw == Pier(pier=7)


async def main() -> None:
    await run_function_agents()
    await run_react_agent()
    await call_tools()


asyncio.run(main())

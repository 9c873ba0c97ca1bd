"""Agents of LangChain, which are graphs of LangGraph, and a graph made by hand: loops of calls,
whole and streamed, over chats and responses; answers of a form that is a tool or a schema.
"""

import asyncio
import sys
from typing import Any

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from loops import ALL, LAST, MODEL, TURNS, Pier, answer_script, calls_text, paths, read_file, script

URL = sys.argv[1] + "/v1"
reader = tool(read_file)


@tool
def ask(path: str) -> str:
    """Read a file that says what the form is."""
    return answer_script('{"pier": 7}')


def read_paths() -> list[str]:
    results, paths[:] = [*paths], []
    return results


def question(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def chat_of(by_responses: bool, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=URL,
        api_key="x",
        model=MODEL,
        max_retries=0,
        temperature=0,
        use_responses_api=by_responses,
        **options,
    )


def loop_whole_and_streamed(chat: ChatOpenAI) -> None:
    agent = create_agent(chat, tools=[reader], system_prompt="Read all of them.")
    whole = agent.invoke(question(script(0)))["messages"]
    assert whole[-1].text.strip() == LAST, whole[-1]
    assert read_paths() == ALL
    ids = [call["id"] for message in whole[1::2] for call in message.tool_calls]
    assert len(set(ids)) == TURNS, ids
    answers = [message for message in whole if isinstance(message, AIMessage)]
    assert all(answer.usage_metadata["output_tokens"] > 0 for answer in answers)
    text, names, arguments = "", [], ""
    for part, _ in agent.stream(question(script(0)), stream_mode="messages"):
        if isinstance(part, AIMessageChunk):
            text += part.text
            names += [piece["name"] for piece in part.tool_call_chunks if piece["name"]]
            arguments += "".join(piece["args"] or "" for piece in part.tool_call_chunks)
    assert text.strip() == LAST and names == ["read_file"] * TURNS, (text, names)
    assert arguments == "".join(f'{{"path": "{path}"}}' for path in ALL), arguments
    assert read_paths() == ALL


def form_after_call(chat: ChatOpenAI) -> None:
    """A call first; then the form, which is a schema of the answer or a tool of its own."""
    first = answer_script(calls_text(("ask", {"path": "a"})))
    agent = create_agent(chat, tools=[ask], response_format=ProviderStrategy(Pier))
    assert agent.invoke(question(first))["structured_response"] == Pier(pier=7)
    agent = create_agent(chat, tools=[reader], response_format=ToolStrategy(Pier))
    results = agent.invoke(question(answer_script(calls_text(("Pier", {"pier": 8})))))
    assert results["structured_response"] == Pier(pier=8)
    by_tool = chat.with_structured_output(Pier, method="function_calling")
    assert by_tool.invoke(answer_script(calls_text(("Pier", {"pier": 9})))) == Pier(pier=9)
    strict = chat.with_structured_output(Pier, method="function_calling", strict=True)
    assert isinstance(strict.invoke("Where?"), Pier)


def choices_of_tool(chat: ChatOpenAI) -> None:
    for choice in ("any", "read_file"):
        bound = chat.bind_tools([reader, ask], tool_choice=choice, parallel_tool_calls=False)
        (call,) = bound.invoke("Which?").tool_calls
        assert choice in ("any", call["name"]), call
    two = answer_script("Both. " + calls_text(("read_file", {"path": "a"}), ("ask", {"path": "b"})))
    answer = chat.bind_tools([reader, ask]).invoke(two)
    assert [call["args"] for call in answer.tool_calls] == [{"path": "a"}, {"path": "b"}]
    assert answer.text.strip() == "Both."
    results = [
        ToolMessage(answer_script(LAST), tool_call_id=call["id"]) for call in answer.tool_calls
    ]
    last = chat.bind_tools([reader, ask]).invoke([("user", two), answer, *results])
    assert last.text.strip() == LAST


async def graph_by_hand(chat: ChatOpenAI) -> None:
    """A graph with a memory: a model, its tools, and the way back."""
    bound = chat.bind_tools([reader])

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", answer)
    graph.add_node("tools", ToolNode([reader]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    memory = graph.compile(checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "one"}}
    state = await memory.ainvoke(question(script(0)), thread)
    assert state["messages"][-1].text.strip() == LAST
    state = await memory.ainvoke(question(answer_script("Still here.")), thread)
    assert state["messages"][-1].text.strip() == "Still here."
    assert len(state["messages"]) == 2 * TURNS + 4
    assert read_paths() == ALL


async def main() -> None:
    for by_responses in (False, True):
        model = chat_of(by_responses)
        loop_whole_and_streamed(model)
        form_after_call(model)
        choices_of_tool(model)
        await graph_by_hand(model)


asyncio.run(main())

"""Agents over topics: each turn of a tool loop is a prompt and its answer; on virtual time."""

import json
from typing import Any

from schemas.model.parsers import ParserNames
from schemas.records import AnswerDelta, DeltaKind
from tests.streams.bridge.samples import AskingBridge, answer_of, pair, record
from tests.streams.gateway.in_process import set_parsers
from tests.virtual_time import virtual

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@virtual
async def test_agent_turn_is_a_record() -> None:
    """The answer's tool calls, with their results, are the next prompt."""
    bridge = AskingBridge(pair(format="avro", parts="rows.parts", schema='{"type": "integer"}'))
    set_parsers(bridge.asking.calls, ParserNames(tool="hermes", reasoning="none"))
    called = AnswerDelta(seq=1, kind=DeltaKind.CALL, call_id="c1", name="look", text='{"q": 1}')
    content = AnswerDelta(seq=1, kind=DeltaKind.CONTENT, text="7")
    bridge.answer_in_turn(bridge.call(called), bridge.call(content))
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    answer = answer_of(await bridge.settle(record({"messages": messages, "tools": [TOOL]})))
    assert (answer.text, answer.parsed, answer.finish_reason) == ("", None, "tool_calls")
    messages += [
        {"role": "assistant", "content": answer.text, "tool_calls": answer.tool_calls},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    answer = answer_of(await bridge.settle(record({"messages": messages, "tools": [TOOL]})))
    assert (answer.text, answer.parsed, answer.tool_calls) == ("7", "7", None)
    first, second = bridge.log.requests
    assert first.parsing is not None and second.parsing is not None
    assert json.loads(second.parsing.tools) == [TOOL] and second.turn == 1
    parts = bridge.log.producer.parts
    assert [(part.text, part.tool_calls is None) for part in parts] == [("", False), ("7", True)]


@virtual
async def test_tools_without_parser_are_refused() -> None:
    bridge = AskingBridge()
    sends = await bridge.settle(record({"text": "hi", "tools": [TOOL]}))
    answer = answer_of(sends)
    assert answer.error_code == "invalid_request" and "model.tool_parser" in str(
        answer.error_message
    )
    assert not bridge.log.requests and sends[1].topic == "rows.dlq"

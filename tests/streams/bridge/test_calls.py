"""A whole call of the API in a prompt: which endpoint's it is, and what no prompt may wish."""

from typing import Any

import pytest
from anthropic.types import Message
from openai.types.responses import Response

from schemas.errors import InvalidRequest
from schemas.model.parsers import ParserNames
from schemas.records import Answer, AnswerDelta, DeltaKind
from streams.bridge.calls import check_call
from streams.calls.embedding import EmbeddingsBody
from streams.calls.request.body import ChatBody, CompletionBody
from streams.openai.batches.lines import EMBEDDINGS, MESSAGES, RESPONSES
from tests.streams.bridge.samples import AskingBridge, answer_of, record
from tests.streams.gateway.in_process import set_parsers
from tests.streams.gateway.samples import MODEL
from tests.virtual_time import virtual

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
NOT_KEPT = (
    "store: not served for prompts and lines of batches, whose responses are not kept; leave it out"
)
INPUT = {"model": "m", "input": "hi"}


@pytest.mark.parametrize(
    ("body", "endpoint", "kind"),
    [
        (CHAT, "", ChatBody),
        (CHAT, "/v1/chat/completions", ChatBody),
        ({"model": "m", "prompt": "hi"}, "", CompletionBody),
        (INPUT, RESPONSES, ChatBody),
        ({**CHAT, "max_tokens": 9}, MESSAGES, ChatBody),
        (INPUT, EMBEDDINGS, EmbeddingsBody),
        ({**INPUT, "truncation_side": "right"}, EMBEDDINGS, EmbeddingsBody),
    ],
)
def test_call_check_chooses_body_by_endpoint(
    body: dict[str, Any], endpoint: str, kind: type
) -> None:
    assert isinstance(check_call(body | {"stream": True}, endpoint).body, kind)


def test_response_call_becomes_chat_with_instructions() -> None:
    body = {**INPUT, "instructions": "Be brief", "max_output_tokens": 3, "store": False}
    call = check_call(body, RESPONSES)
    assert call.response is not None and isinstance(call.body, ChatBody)
    assert [message.content for message in call.body.messages] == ["Be brief", "hi"]
    assert call.body.max_completion_tokens == 3
    assert [item["id"] for item in call.response.items] == ["msg__0"], "of no request yet"


@pytest.mark.parametrize(
    ("body", "endpoint", "message"),
    [
        (INPUT, "/v1/rerank", "endpoint: expected one of /v1/chat/completions, /v1/completions, "),
        (INPUT, "/v1/chat/completions", "messages: required, but missing"),
        (CHAT, MESSAGES, "max_tokens: required, but missing"),
        ({**CHAT, "max_tokens": 9, "mcp_servers": [{}]}, MESSAGES, "mcp_servers: "),
        ({**CHAT, "max_tokens": 9, "n": 2}, MESSAGES, "n: "),
        ({**INPUT, "store": True}, RESPONSES, NOT_KEPT),
        ({**INPUT, "background": True}, RESPONSES, "background: not served for prompts"),
        ({**INPUT, "previous_response_id": "r"}, RESPONSES, "previous_response_id: not served"),
        ({**INPUT, "conversation": "conv_1"}, RESPONSES, "conversation: not served"),
        ({**INPUT, "conversation": {}}, RESPONSES, "conversation: expected the id"),
        ({**INPUT, "colour": "red"}, RESPONSES, "colour: unknown field"),
        ({**INPUT, "input": []}, RESPONSES, "input: expected a message, found none"),
        ({**INPUT, "input": [-1]}, EMBEDDINGS, "input.0: expected texts, or token ids"),
        (
            {"input": [{"type": "item_reference", "id": "rs_1"}]},
            RESPONSES,
            "input.0: expected an item, found a reference to one, which is not kept for prompts "
            "and lines of batches; send the item itself",
        ),
        ({**INPUT, "colour": "red"}, EMBEDDINGS, "colour: unknown field"),
        ({**INPUT, "temperature": 0.5}, EMBEDDINGS, "temperature: unknown field"),
    ],
)
def test_call_error_names_invalid_field(body: dict[str, Any], endpoint: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_call(body, endpoint)
    assert caught.value.message.startswith(message)
    assert caught.value.param == message.partition(":")[0]


@virtual
async def test_response_of_a_line_has_reasoning_and_tool_calls() -> None:
    """A line of a batch has reasoning and calls as items, as /v1/responses would have them."""
    bridge = AskingBridge()
    parsers = ParserNames(tool="hermes", reasoning="qwen3")
    set_parsers(bridge.asking.calls, parsers)
    bridge.answer_in_turn(
        bridge.call(
            AnswerDelta(seq=1, kind=DeltaKind.REASONING, text="Hm."),
            AnswerDelta(seq=1, kind=DeltaKind.CALL, text="{}", name="f", call_id="c1"),
            AnswerDelta(
                seq=1, kind=DeltaKind.CALL, text='{"input": "x"}', index=1, name="g", call_id="c2"
            ),
        )
    )
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]
    body = {"model": MODEL, "input": "hi", "tools": tools}
    line = record({"body": body, "endpoint": "/v1/responses"})
    answer = answer_of(await bridge.settle(line))
    thought, call, custom = Response.model_validate_json(answer.body or "").output
    assert thought.type == "reasoning" and thought.content
    assert thought.content[0].text == "Hm."
    assert call.type == "function_call" and (call.name, call.arguments) == ("f", "{}")
    assert custom.type == "custom_tool_call" and (custom.name, custom.input) == ("g", "x")
    (request,) = bridge.log.requests
    assert request.parsing is not None and '"name":"g"' in request.parsing.tools


@virtual
async def test_message_call_is_answered_with_message() -> None:
    """The `anthropic` package can parse it, and that of a request which another bridge has sent."""
    bridge = AskingBridge()
    bridge.answer_in_turn(bridge.answer("Hel", "lo"))
    turns = [{"role": "user", "content": "hi"}]
    call = {"messages": turns, "system": "Greet", "max_tokens": 7, "temperature": 0.5}
    prompt_record = record({"body": {"model": MODEL, **call}, "endpoint": MESSAGES})
    answer = answer_of(await bridge.settle(prompt_record))
    message = Message.model_validate_json(answer.body or "")
    assert [block.text for block in message.content if block.type == "text"] == ["Hello"]
    assert (message.stop_reason, message.model) == ("end_turn", MODEL)
    assert message.usage.output_tokens == answer.completion_tokens == 2
    assert answer.text == "Hello"
    (request,) = bridge.log.requests
    assert (request.sampling.max_tokens, request.sampling.temperature) == (7, 0.5)
    recovered = await bridge.pending_prompt(prompt_record)
    bridge.asking.begin(recovered)
    bridge.answer("a")(bridge.log.requests[0])
    for _ in range(2):  # it may be asked for the outcome again
        outcome = await bridge.asking.outcome(recovered)
        assert isinstance(outcome, Answer)
        message = Message.model_validate_json(outcome.body or "")
        assert [block.text for block in message.content if block.type == "text"] == ["a"]

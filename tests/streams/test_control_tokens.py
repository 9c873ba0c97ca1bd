"""All ways by which a text gets into a prompt: on none does it become a control token.

A way says a text somewhere, and gives the tokens of the prompt that comes of it. Texts that differ
in what they spell only make prompts with the same control tokens in the same order.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from schemas.records import Document, Endpoint, Passage, Retrieval
from schemas.rules.tokens import pack_tokens, unpack_tokens
from schemas.settings import ModelSettings
from streams.calls.request.body import ChatBody
from streams.calls.request.intake import take_in, take_in_body
from streams.calls.request.tokenizer import Tokenizer
from streams.core.requests.context import with_context
from streams.openai.batches.lines import CHAT, RESPONSES, call_of
from tests.schemas.model.steered_models import KINDS, Steered, steered
from tests.streams.bridge.samples import CODEC, pair, question_of
from tests.streams.builders import request, retrieved
from tests.streams.gateway.answering import answer, body
from tests.streams.gateway.batch_samples import file_of, line
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat, completion
from workers.embed.chunking import Span
from workers.embed.content import Cutting, passages_of
from workers.embed.embedders.served_tokens import ServedTokens
from workers.llm.probing.passages import choose_passages, insert_tokens

Way = Callable[[InProcessGateway, Steered, str], Awaitable[Sequence[int]]]
NAME_CHARS = 64  # of what is refused beyond
SOUGHT = {"collection": "books", "probes": {}}
CHATS: dict[str, Callable[[str], dict[str, Any]]] = {  # by what says the text
    "content": chat,
    "parts": lambda text: _chat_with({"role": "user", "content": [_part(text), _part(text)]}),
    "system": lambda text: _chat_with({"role": "system", "content": text}),
    "answer": lambda text: _chat_with({"role": "assistant", "content": text}),
    "refusal": lambda text: _chat_with({"role": "assistant", "refusal": text}),
    "name": lambda text: _chat_with({"role": "user", "name": text, "content": "x"}),
    "name and content": lambda text: _chat_with(
        {"role": "user", "name": text[: len(text) // 2], "content": text[len(text) // 2 :]}
    ),
    "role": lambda text: _chat_with({"role": text, "content": "x"}),
    "result": lambda text: _chat_with(
        {"role": "assistant", "tool_calls": [{"id": text, "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": text, "content": text},
    ),
    "reasoning": lambda text: _chat_with(
        {"role": "assistant", "reasoning": text, "content": "x"},
        {"role": "assistant", "reasoning_content": text, "content": "x"},
    ),
    "call": lambda text: _called({"name": text, "arguments": json.dumps({"a": [text]})}),
    "argument": lambda text: _called({"name": "f", "arguments": json.dumps({text: "v"})}),
    "call as text": lambda text: _called({"name": "f", "arguments": json.dumps({"t": text})}),
    "former call": lambda text: _chat_with(
        {"role": "assistant", "function_call": {"name": text, "arguments": "{}"}}
    ),
    "tool": lambda text: chat(
        "x",
        tool_choice="none",
        tools=[_tool("f", text, {text: {"type": "string", "enum": [text]}})],
    ),
    "variable": lambda text: chat("x", chat_template_kwargs={"words": [{text: text}]}),
    "variable by itself": lambda text: chat("x", chat_template_kwargs={"word": f"{text} x"}),
    "reasoning effort": lambda text: chat("x", reasoning_effort=text),
    "continued": lambda text: chat(
        "x",
        messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": text}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "looked up": lambda text: chat(text, retrieval=SOUGHT),
}


def _chat_with(*messages: dict[str, Any]) -> dict[str, Any]:
    return chat("x", messages=[{"role": "user", "content": "x"}, *messages])


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _called(function: dict[str, Any]) -> dict[str, Any]:
    call_ = {"id": "c", "type": "function", "function": function}
    return _chat_with({"role": "assistant", "content": "", "tool_calls": [call_]})


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


async def in_chat(
    of: Callable[[str], dict[str, Any]], gateway: InProcessGateway, _: Steered, text: str
) -> Sequence[int]:
    raw = json.dumps(of(text)).encode()
    intake = await take_in(raw, Endpoint.CHAT, gateway.state.models, gateway.state.settings)
    return intake.prompts[0]


async def in_very_long_chat(gateway: InProcessGateway, model: Steered, text: str) -> Sequence[int]:
    """Which another process encodes."""
    gateway.state.models.default.tokenizer.encoder.thread_chars_max = 1
    return await in_chat(chat, gateway, model, text)


async def in_response(gateway: InProcessGateway, _: Steered, text: str) -> Sequence[int]:
    """As instructions, in items of all kinds, and in the answer that is gone on with."""
    gateway.log.on_request = lambda request: answer(gateway, request, [f"{text} x"], citations=())
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": text}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]},
        {"type": "custom_tool_call", "call_id": f"{text}x", "name": text, "input": text},
        {"type": "function_call", "call_id": text, "name": text, "arguments": f'{{"a": "{text}"}}'},
        {"type": "function_call_output", "call_id": text, "output": text},
    ]
    before = len(gateway.log.requests)
    for fields in ({"instructions": text}, {}):
        status, response = await call(gateway, body(items, **fields), "/v1/responses")
        assert status == 200, response
        items = [{"role": "user", "content": text}]
        next_body = body(items, previous_response_id=response["id"])
        status, response = await call(gateway, next_body, "/v1/responses")
        assert status == 200, response
    prompts = [unpack_tokens(request.prompt_tokens) for request in gateway.log.requests[before:]]
    return [token for prompt in prompts for token in prompt]


async def in_prompt(gateway: InProcessGateway, _: Steered, text: str) -> Sequence[int]:
    """On a topic, with a pair's own words first."""
    question = await question_of({"text": f"{text} x"}, pair(system=text))
    assert isinstance(question.body, ChatBody)
    intake = await take_in_body(question.body, gateway.state.models, gateway.state.settings)
    return intake.prompts[0]


async def in_batch(gateway: InProcessGateway, _: Steered, text: str) -> Sequence[int]:
    """In a file of calls."""
    models, settings, tokens = gateway.state.models, gateway.state.settings, list[int]()
    for url, call_body in ((CHAT, chat(text)), (RESPONSES, body(text, instructions=text))):
        prompt = call_of(file_of(line("a", url, body=call_body))).prompt(url)
        question = await question_of(CODEC.encode(prompt))
        if question.response is not None:
            intake = await question.response.take_in(models, settings)
        else:
            assert isinstance(question.body, ChatBody)
            intake = await take_in_body(question.body, models, settings)
        tokens += intake.prompts[0]
    return tokens


def _document(text: str, tokens: Callable[[str], Sequence[int]]) -> Passage:
    """The passage of a document that says it in its text, its name and its title."""
    document_passages = passages_of(
        Document(
            document_id=text,
            collection="books",
            text=text,
            metadata=json.dumps({"title": text, "source": text}),
            at_ms=0,
        ),
        Cutting(256, 0, "hash@1", "m@1"),
        [Span(0, len(text))],
        np.ones((1, 4), np.float32),
        tokens,
        documents_offset=0,
        now_ms=0,
    )
    (chunk,) = document_passages.chunks
    return Passage(
        passage_id=f"{text}#0", document_id=text, text=chunk.text, tokens=chunk.tokens, title=text
    )


async def _wish(gateway: InProcessGateway) -> tuple[Sequence[int], Retrieval]:
    raw = json.dumps(chat("x", retrieval=SOUGHT)).encode()
    models, settings = gateway.state.models, gateway.state.settings
    intake = await take_in(raw, Endpoint.CHAT, models, settings)
    assert intake.search is not None
    wish = intake.search.record(settings, intake.samplings[0], models.default.card.max_model_len, 0)
    return intake.prompts[0], wish


async def _with(gateway: InProcessGateway, passage: Passage, *, cited: bool) -> list[int]:
    """The prompt, and what a probe puts into the answer."""
    prompt, wish = await _wish(gateway)
    plain = request("r1", retrieval=wish, prompt_tokens=pack_tokens(prompt))
    context = with_context(plain, retrieved("r1", passage))
    assert len(context.notice.citations) == cited and context.notice.left_out == (not cited)
    assert wish.probing is not None
    passages, left_out = choose_passages(
        wish.probing, [passage], (), reserved=wish.reserved, tokens_max=999, space_tokens=9_999
    )
    assert len(passages) == cited and left_out == (not cited)
    probed = insert_tokens(wish.probing, passages)
    return [*unpack_tokens(context.request.prompt_tokens), *unpack_tokens(probed)]


async def in_document(gateway: InProcessGateway, model: Steered, text: str) -> Sequence[int]:
    tokens = ServedTokens(ModelSettings(path=str(model.folder), name="m"))
    return await _with(gateway, _document(text, tokens.ids), cited=True)


WAYS: dict[str, Way] = {
    **{f"chat: {name}": partial(in_chat, of) for name, of in CHATS.items()},
    "response": in_response,
    "prompt": in_prompt,
    "batch": in_batch,
    "document": in_document,
}


def spelled(model: Steered) -> Iterator[str]:
    """Names, in either case, and pieces to which a template may write the rest."""
    yield "".join(model.names)
    yield from {" ".join(model.names).upper(), " ".join(model.names).lower()}
    for name in (model.begin, model.end):
        yield from (name, name[1:], name[:-1], name[1:-1], name.strip("<|/[]>"))
        yield from (f"a{name[:-1]}", f"{name[1:]}a")


def gateway_of(model: Steered) -> InProcessGateway:
    return InProcessGateway(max_model_len=8_192, tokenizer=Tokenizer(model.folder))


def steering_ids(gateway: InProcessGateway, model: Steered) -> set[int]:
    raw = gateway.state.models.default.tokenizer.encoder.raw
    vocabulary = raw.get_vocab()
    return {vocabulary[name] for name in model.names}


@pytest.mark.parametrize("kind", KINDS.values())
async def test_prompt_text_never_becomes_control_token(kind: str) -> None:
    """Once documents were encoded by another rule than messages."""
    model = steered(kind)
    gateway = gateway_of(model)
    steering = steering_ids(gateway, model)
    for name, way in WAYS.items():
        expected = [token for token in await way(gateway, model, "x") if token in steering]
        for text in spelled(model):
            if len(text) > NAME_CHARS and name in ("chat: role", "chat: reasoning effort"):
                continue
            prompt = await way(gateway, model, text)
            assert [token for token in prompt if token in steering] == expected, (name, text)


async def test_encoder_process_makes_no_control_tokens() -> None:
    model = steered("sim")
    gateway = gateway_of(model)
    steering = steering_ids(gateway, model)
    counts = []
    for text in ("x", "".join(model.names)):
        prompt = await in_very_long_chat(gateway, model, text)
        counts.append(sum(token in steering for token in prompt))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("kind", KINDS.values())
async def test_prompt_leaves_out_passages_with_control_or_unknown_tokens(kind: str) -> None:
    """A record of a stranger or of an earlier version may hold any token."""
    model = steered(kind)
    gateway = gateway_of(model)
    tokenizer = gateway.state.models.default.tokenizer
    plain = tokenizer.encoder.ids(["hello"]).tolist()

    def tokens(text: str) -> Sequence[int]:
        return plain

    for wrong in (*steering_ids(gateway, model), tokenizer.vocab, -1, (1 << 31) - 1):
        ids = pack_tokens([*plain, wrong])
        await _with(gateway, replace(_document("x", tokens), tokens=ids), cited=False)
    await _with(gateway, _document("x", tokens), cited=True)


async def test_completion_prompt_keeps_control_tokens() -> None:
    """A client that sends a whole prompt writes its template itself."""
    model = steered("sim")
    gateway = gateway_of(model)
    models, settings = gateway.state.models, gateway.state.settings
    tokenizer = models.default.tokenizer
    raw = json.dumps(completion(f"{model.begin}user\nx{model.end}")).encode()
    intake = await take_in(raw, Endpoint.COMPLETION, models, settings)
    steering = [t for t in intake.prompts[0] if t in tokenizer.control.ids]
    assert [tokenizer.token_text(t) for t in steering] == [model.begin, model.end]

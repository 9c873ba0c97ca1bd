"""POST /v1/messages and /v1/messages/count_tokens: a chat in Anthropic's form.

The chat is accepted as any other; only its answer is written in another form. A call with
`Last-Event-ID` resumes a stream instead (`resume.py`).
"""

import orjson

from streams.anthropic.body import CountTokensBody, MessagesBody, refuse_fields
from streams.anthropic.chat import chat_body, limited
from streams.anthropic.content import AnswerContent
from streams.anthropic.events import MessageEvents
from streams.anthropic.message import whole_message
from streams.calls.request.body import parse
from streams.calls.request.chat import chat_of
from streams.calls.request.intake import chat_prompt, take_in_body
from streams.calls.request.tools import tools_of
from streams.calls.requests import Inquiry, accept, options_of
from streams.calls.stream.hub import Call
from streams.gateway.endpoints.generate import answer, conversation_of
from streams.gateway.endpoints.resume import RESUME_HEADER, last_event, resume
from streams.gateway.http.delivery import COMPLETED, write_stream, write_whole
from streams.gateway.http.entry import HttpExchange
from streams.gateway.state import Gateway

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"


async def create_message(gateway: Gateway, exchange: HttpExchange) -> str:
    """Answer a call; return the outcome, raise the errors for the caller."""
    _begin(gateway, exchange)
    if RESUME_HEADER in exchange.headers:
        key, positions = last_event(gateway, exchange)
        await exchange.read_body(gateway.callers.body_reader)
        return await resume(gateway, exchange, key, positions)
    await gateway.calls.admit(exchange.tenant)  # before the body takes memory
    body = parse(MessagesBody, await exchange.read_body(gateway.callers.body_reader))
    refuse_fields(body)
    inquiry = await _inquiry(gateway, exchange, body)
    call = await accept(gateway.calls, exchange, inquiry)

    async def write() -> str:
        return await _write(gateway, exchange, inquiry, call)

    return await answer(gateway, exchange, call, write, keeps_running=inquiry.options.keeps_running)


async def count_tokens(gateway: Gateway, exchange: HttpExchange) -> str:
    """Send the number of tokens of a prompt, which is not computed; return the outcome."""
    _begin(gateway, exchange)
    body = parse(CountTokensBody, await exchange.read_body(gateway.callers.body_reader))
    refuse_fields(body)
    served, _ = await gateway.models.of_call(body.model)
    chat_fields = chat_body(body)
    tools, template = tools_of(chat_fields), served.tokenizer.template
    chat = chat_of(chat_fields, chat_fields.messages, template, tools)
    tokens = await chat_prompt(chat, served, gateway.settings, exchange.tenant)
    await exchange.send_whole(orjson.dumps({"input_tokens": len(tokens)}), exchange.reply_headers)
    return COMPLETED


def _begin(gateway: Gateway, exchange: HttpExchange) -> None:
    """Begin an exchange with the header in which Anthropic's clients look for the request's id."""
    try:
        exchange.begin(gateway.callers)
    finally:
        exchange.reply_headers.append((b"request-id", exchange.call_id.encode()))


async def _inquiry(gateway: Gateway, exchange: HttpExchange, body: MessagesBody) -> Inquiry:
    headers, settings = exchange.headers, gateway.settings
    intake = await take_in_body(chat_body(body), gateway.models, settings, exchange.tenant)
    intake = limited(intake, body)
    conversation = conversation_of(gateway, exchange, intake)
    exchange.reply_headers.append((b"x-session-id", conversation.session_id.encode()))
    return Inquiry(
        intake=intake,
        options=options_of(headers, exchange.arrived_ms, intake, settings),
        conversation=conversation,
        is_message=True,
    )


async def _write(gateway: Gateway, exchange: HttpExchange, inquiry: Inquiry, call: Call) -> str:
    tokens_max = inquiry.intake.card.max_model_len
    content = AnswerContent(call.key.parent_id)
    if call.waits_for_end:

        def body() -> bytes:
            nonlocal content
            whole, content = whole_message(call, tokens_max)
            return whole

        outcome = await write_whole(exchange, call, body)
    else:
        writer = MessageEvents(
            call,
            tokens_max=tokens_max,
            name=gateway.event_ids.name(call.key) if inquiry.options.event_ids else b"",
            prompt_tokens=len(inquiry.intake.prompts[0]),
        )
        outcome = await write_stream(exchange, call, writer)
        content = writer.content
    if outcome == COMPLETED:
        gateway.remember(inquiry.conversation, content.text, content.call_texts)
    return outcome

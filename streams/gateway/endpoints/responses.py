"""POST /v1/responses: a chat in OpenAI's newer form, whose call any gateway can find again.

The chat is accepted as any other. Its call is stored on topic `responses`, with all earlier
messages; the answer is already on `tokens`.
"""

from collections.abc import Sequence
from dataclasses import replace

import orjson

from schemas.errors import PromptTooLong
from schemas.records import StoredResponse
from streams.calls.ids import Conversation, call_text
from streams.calls.request.body import parse
from streams.calls.request.responses_body import ResponsesBody, refuse_fields
from streams.calls.requests import Inquiry, accept, options_of
from streams.calls.stream.chunks import KEEPALIVE
from streams.calls.stream.hub import Call
from streams.gateway.endpoints.conversations import begin_turn, turns_before
from streams.gateway.endpoints.generate import answer, conversation_of
from streams.gateway.endpoints.stored_responses import load_conversation, resolve_references
from streams.gateway.http.delivery import (
    COMPLETED,
    reply_headers,
    write_stream,
    write_whole,
)
from streams.gateway.http.entry import HttpExchange
from streams.gateway.state import Gateway
from streams.openai.responses.call import EarlierTurns, ResponseCall
from streams.openai.responses.events import ResponseEvents
from streams.openai.responses.form import Form, whole_of
from streams.openai.responses.items import Item, items_of, messages_of

ACCEPTED = "accepted"


async def create(gateway: Gateway, exchange: HttpExchange) -> str:
    """Answer a call, or start it in the background; return the outcome, raise the errors for the
    caller."""
    exchange.begin(gateway.callers)
    await gateway.calls.admit(exchange.tenant)  # before the body takes memory
    raw = await exchange.read_body(gateway.callers.body_reader)
    body = parse(ResponsesBody, raw)
    refuse_fields(body)
    conversation_id, tenant = body.conversation_id, exchange.tenant
    items = await resolve_references(gateway, tenant, items_of(body.input, exchange.call_id))
    earlier = EarlierTurns()
    if conversation_id is not None:
        earlier = await turns_before(gateway, tenant, conversation_id, items)
    if body.previous_response_id is not None:
        earlier = await load_conversation(gateway, exchange, body.previous_response_id)
    response_call = ResponseCall(body=body, items=items, earlier=earlier)
    inquiry = await _inquiry(gateway, exchange, response_call)
    call = await accept(gateway.calls, exchange, inquiry)
    try:
        record = response_call.record(inquiry.intake, call.key)
        form = Form(await _response_id(gateway, record, body), record)
    except BaseException:
        gateway.calls.give_up(call)
        raise
    return await _answer(gateway, exchange, inquiry, call, form)


async def _inquiry(
    gateway: Gateway, exchange: HttpExchange, response_call: ResponseCall
) -> Inquiry:
    try:
        intake = await response_call.take_in(gateway.models, gateway.settings, exchange.tenant)
    except PromptTooLong as error:
        raise PromptTooLong(error.message, "input") from None
    conversation = conversation_of(gateway, exchange, intake)
    if response_call.earlier.session_id:  # that session has the KV of earlier turns
        turn = sum(message["role"] == "assistant" for message in response_call.messages)
        conversation = Conversation(session_id=response_call.earlier.session_id, turn=turn)
    exchange.reply_headers.append((b"x-session-id", conversation.session_id.encode()))
    options = options_of(exchange.headers, exchange.arrived_ms, intake, gateway.settings)
    if response_call.body.background:
        options = replace(options, keeps_running=True, event_ids=True)
    return Inquiry(intake=intake, options=options, conversation=conversation)


async def _response_id(gateway: Gateway, record: StoredResponse, body: ResponsesBody) -> str:
    """Store the call if it is to be stored, or has a conversation; return the response's id."""
    is_stored, place = body.store is not False, None
    if is_stored or body.conversation_id is not None:
        place = await gateway.responses.put(record)
    if body.conversation_id is not None and place is not None:
        await begin_turn(gateway, record, place, body.conversation_id)
    return gateway.response_ids.name(record.request_id, record.tenant, place if is_stored else None)


async def _answer(
    gateway: Gateway, exchange: HttpExchange, inquiry: Inquiry, call: Call, form: Form
) -> str:
    conversation = inquiry.conversation

    async def write() -> str:
        if call.waits_for_end:
            outcome = await write_whole(exchange, call, lambda: whole_of(form, call))
            output = form.output_of(call.streams[0])
        else:
            keepalive = KEEPALIVE if inquiry.options.event_ids else b""
            writer = ResponseEvents(form, call, keepalive=keepalive)
            outcome = await write_stream(exchange, call, writer)
            output = writer.output
        if outcome == COMPLETED:
            _remember(gateway, conversation, form.items(call.streams[0], output, COMPLETED))
        return outcome

    if form.is_background and call.waits_for_end:
        call.hang_up()  # the client does not wait for the end
        gateway.calls.detach(call)  # counted until it ends, even after an error here
        await exchange.send_whole(orjson.dumps(form.initial_response()), reply_headers(call))
        return ACCEPTED
    return await answer(gateway, exchange, call, write, keeps_running=inquiry.options.keeps_running)


def _remember(gateway: Gateway, conversation: Conversation, items: Sequence[Item]) -> None:
    """Remember an answer that is one message for the conversation's next turn."""
    messages = messages_of(items)
    if len(messages) != 1:
        return
    calls = messages[0].get("tool_calls", ())
    texts = [call_text(called["id"], **called["function"]) for called in calls]
    gateway.remember(conversation, messages[0]["content"], texts)

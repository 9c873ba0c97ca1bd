"""POST /v1/responses: a chat in OpenAI's newer form, whose call any gateway can find again.

The chat is accepted as any other. Its call is stored on topic `responses`, with all earlier
messages; the answer is already on `tokens`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from schemas.errors import InvalidRequest, PromptTooLong
from schemas.records import StoredResponse
from streams.gateway.config import GatewaySettings
from streams.gateway.endpoints.generate import (
    Inquiry,
    accept,
    answer,
    conversation_of,
    give_up,
)
from streams.gateway.http.exchange import HttpExchange
from streams.gateway.ids import new_request_id
from streams.gateway.request.body import ChatBody, parse
from streams.gateway.request.conversation import Conversation
from streams.gateway.request.intake import CallIntake, ServedModel, take_in_body
from streams.gateway.request.options import options_of
from streams.gateway.request.responses_body import ResponsesBody, refuse_fields
from streams.gateway.responses.chat import chat_body
from streams.gateway.responses.events import ResponseEvents
from streams.gateway.responses.form import Form, Json, whole_of
from streams.gateway.responses.items import Item, items_of, messages_of
from streams.gateway.responses.stored import EarlierTurns, load_conversation, resolve_references
from streams.gateway.state import Gateway
from streams.gateway.stream.delivery import (
    COMPLETED,
    KEEPALIVE,
    reply_headers,
    write_stream,
    write_whole,
)
from streams.gateway.stream.event_id import StreamKey
from streams.gateway.stream.hub import Call

ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall:
    """A call's body, its items, and the messages of earlier turns."""

    body: ResponsesBody
    items: Sequence[Item]
    earlier: EarlierTurns = field(default_factory=EarlierTurns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Build the messages of the whole chat."""
        instructions = self.body.instructions
        system = [{"role": "system", "content": instructions}] if instructions else []
        return [*system, *self.earlier.messages, *messages_of(self.items)]

    def chat(self) -> ChatBody:
        """Build the chat that answers the call; raises InvalidRequest."""
        if not (messages := self.messages):
            raise InvalidRequest("input: expected a message, found none", "input")
        return chat_body(self.body, messages)

    async def take_in(
        self, served: ServedModel, settings: GatewaySettings, tenant: str = ""
    ) -> CallIntake:
        """Check and tokenise the chat.

        With `truncation: auto`, the fewest possible first messages are left out of a chat that is
        too long. Raises InvalidRequest and PromptTooLong.
        """
        self._texts(served.name)  # refuse values that cannot be stored before anything is computed
        chat = self.chat()
        try:
            return await take_in_body(chat, served, settings, tenant)
        except PromptTooLong:
            low, high = 1, len(_droppable(chat)) - 1
            if self.body.truncation != "auto" or high < low:
                raise
        while low < high:
            middle = (low + high) // 2
            try:
                await take_in_body(_without_first(chat, middle), served, settings, tenant)
                high = middle
            except PromptTooLong:
                low = middle + 1
        return await take_in_body(_without_first(chat, low), served, settings, tenant)

    def _texts(self, served: str) -> dict[str, str]:
        """Encode the stored parts of the call as JSON; raises InvalidRequest for values that JSON
        lacks."""
        options = _options(self.body, served)
        fields = [f"{_json(name, name)}:{_json(value, name)}" for name, value in options.items()]
        items = [_json(item, f"input.{i}") for i, item in enumerate(self.items)]
        return {
            "options": f"{{{','.join(fields)}}}",
            "input": f"[{','.join(items)}]",
            "history": _json(self.earlier.messages, "previous_response_id"),
        }

    def record(self, intake: CallIntake, key: StreamKey) -> StoredResponse:
        """Build the record that is stored on the log."""
        search = intake.search
        return StoredResponse(
            request_id=key.parent_id,
            session_id=key.session_id,
            tenant=key.tenant,
            created_ms=key.created_s * 1000,
            deadline_ms=key.deadline_ms,
            token_partition=key.partition,
            token_offset=key.offset,
            query="" if search is None else search.query,
            include=self.body.include or (),
            **self._texts(key.model),
        )


def _json(value: Any, field: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise InvalidRequest(
            f"{field}: cannot be kept, nor told of: {error}; store large numbers as text", field
        ) from error


def _droppable(chat: ChatBody) -> list[int]:
    """Return the indices of messages that may be left out: all except instructions."""
    return [
        i for i, message in enumerate(chat.messages) if message.role not in ("system", "developer")
    ]


def _without_first(chat: ChatBody, count: int) -> ChatBody:
    dropped = set(_droppable(chat)[:count])
    messages = [message for i, message in enumerate(chat.messages) if i not in dropped]
    return chat.model_copy(update={"messages": messages})


async def create(gateway: Gateway, exchange: HttpExchange) -> str:
    """Answer a call, or start it in the background; return the outcome, raise the errors for the
    caller."""
    exchange.call_id = new_request_id(exchange.arrived_ms)
    exchange.reply_headers.append((b"x-request-id", exchange.call_id.encode()))
    exchange.tenant = gateway.keys.tenant(exchange.headers)
    await gateway.admit(exchange.tenant)  # before the body takes memory
    raw = await exchange.read_body(gateway.body_reader)
    body = parse(ResponsesBody, raw)
    refuse_fields(body)
    items = await resolve_references(gateway, exchange, items_of(body.input, exchange.call_id))
    earlier = EarlierTurns()
    if body.previous_response_id is not None:
        earlier = await load_conversation(gateway, exchange, body.previous_response_id)
    response_call = ResponseCall(body=body, items=items, earlier=earlier)
    inquiry = await _inquiry(gateway, exchange, response_call)
    call = await accept(gateway, exchange, inquiry)
    try:
        record = response_call.record(inquiry.intake, call.key)
        form = Form(await _response_id(gateway, record, body.store is not False), record)
    except BaseException:
        give_up(gateway, call)
        raise
    return await _answer(gateway, exchange, inquiry, call, form)


async def _inquiry(
    gateway: Gateway, exchange: HttpExchange, response_call: ResponseCall
) -> Inquiry:
    try:
        intake = await response_call.take_in(gateway.served, gateway.settings, exchange.tenant)
    except PromptTooLong as error:
        raise PromptTooLong(error.message, "input") from None
    conversation = conversation_of(gateway, exchange, intake)
    if response_call.earlier.session_id:  # that session has the KV of earlier turns
        turn = sum(message["role"] == "assistant" for message in response_call.messages)
        conversation = Conversation(session_id=response_call.earlier.session_id, turn=turn)
    exchange.reply_headers.append((b"x-session-id", conversation.session_id.encode()))
    options = options_of(exchange, intake, gateway.settings)
    if response_call.body.background:
        options = replace(options, keeps_running=True, event_ids=True)
    return Inquiry(intake=intake, options=options, conversation=conversation)


async def _response_id(gateway: Gateway, record: StoredResponse, store: bool) -> str:
    """Store the call if it is to be stored, and return the response's id."""
    place = await gateway.backend.responses.put(record) if store else None
    return gateway.response_ids.name(record.request_id, record.tenant, place)


async def _answer(
    gateway: Gateway, exchange: HttpExchange, inquiry: Inquiry, call: Call, form: Form
) -> str:
    conversation = inquiry.conversation

    async def write() -> str:
        if call.waits_for_end:
            outcome = await write_whole(exchange, call, lambda: whole_of(form, call))
            text = call.streams[0].drain()
        else:
            keepalive = KEEPALIVE if inquiry.options.event_ids else b""
            writer = ResponseEvents(form, call, keepalive=keepalive)
            outcome = await write_stream(exchange, call, writer)
            text = writer.text
        if outcome == COMPLETED:
            gateway.remember(conversation, text)
        return outcome

    if form.is_background and call.waits_for_end:
        call.hang_up()  # the client does not wait for the end
        gateway.detach(call)  # counted until it ends, even after an error here
        await exchange.send_whole(orjson.dumps(form.initial_response()), reply_headers(call))
        return ACCEPTED
    return await answer(gateway, exchange, call, write, keeps_running=inquiry.options.keeps_running)


def _options(body: ResponsesBody, served: str) -> Json:
    """Return the options that the response repeats, with defaults for those that the call lacks."""
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body.text is not None:
        text |= body.text.model_dump(by_alias=True, exclude_none=True)
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model or served,
        "parallel_tool_calls": False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "previous_response_id": body.previous_response_id,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": text,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }

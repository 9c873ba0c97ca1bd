"""Stored responses, at any gateway: the record from `responses`, the answer from `tokens`.

GET and DELETE /v1/responses/{id}, POST …/cancel, GET …/input_items, the earlier turns of a next
response, and the items that responses add to conversations.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import parse_qs

import orjson

from schemas.errors import BrokerUnavailable, DeadlineExceeded, InvalidRequest, NotFound
from schemas.records import Cancellation, CancelReason, PendingTurn
from streams.calls.ids import RESPONSE_PREFIX, new_request_id
from streams.calls.request.responses_body import check_include
from streams.calls.stream.answers import call_error
from streams.calls.stream.chunks import KEEPALIVE
from streams.calls.stream.event_id import ClientPosition
from streams.calls.stream.hub import DEADLINE_GRACE_MS, Call, Hub
from streams.gateway.endpoints.resume import RESUME_MS, read_on, resumed_call
from streams.gateway.http.delivery import COMPLETED
from streams.gateway.http.entry import HttpExchange
from streams.gateway.state import Gateway
from streams.log.clock import wall_ms
from streams.openai.objects.conversations import conversation_key, stored_items
from streams.openai.responses.call import EarlierTurns
from streams.openai.responses.events import ResponseEvents
from streams.openai.responses.form import PREFIXES, Form, whole_of
from streams.openai.responses.items import REFERENCE, Item, messages_of
from streams.openai.responses.response_id import NAME_CHARS, RecordPosition

_INCLUDED = ("include", "include[]")
_NUMBER_MAX = 1 << 53
REFERENCES_MAX = 64  # per call; each is read from the log
_IN_NO_PROMPT = ("fs_", "rs_")  # ids of items that a prompt can do without
_ITEMS, _ITEMS_MAX, _PARAMETERS_MAX = 20, 100, 32
Listed = TypeVar("Listed")


async def load_conversation(
    gateway: Gateway, exchange: HttpExchange, response_id: str
) -> EarlierTurns:
    """Return the conversation that ends with a response; raises NotFound, InvalidRequest."""
    tenant = exchange.tenant
    form, items = await _load_answer(gateway, tenant, response_id, "previous_response_id")
    record = form.record
    history = [*orjson.loads(record.history), *messages_of(orjson.loads(record.input))]
    return EarlierTurns(session_id=record.session_id, messages=[*history, *messages_of(items)])


async def resolve_references(
    gateway: Gateway, tenant: str, items: Sequence[Item], field: str = "input"
) -> list[Item]:
    """Return the items of a call's `field`, with references replaced by the items of answers;
    raises NotFound, InvalidRequest."""
    references = [i for i, item in enumerate(items) if item["type"] == REFERENCE]
    if len(references) > REFERENCES_MAX:
        raise InvalidRequest(
            f"{field}: expected at most {REFERENCES_MAX} references to items, found "
            f"{len(references)}; use previous_response_id, or send the messages themselves",
            field,
        )
    resolved_items = list(items)
    answers: dict[str, Mapping[str, Item]] = {}  # by the response: its items by their ids
    for i in references:
        item_id = items[i]["id"]
        prefix = next((prefix for prefix in PREFIXES if item_id.startswith(prefix)), "")
        response_id = RESPONSE_PREFIX + item_id.removeprefix(prefix)[:NAME_CHARS]
        try:
            if response_id not in answers:
                param = f"{field}.{i}.id"
                _, output = await _load_answer(gateway, tenant, response_id, param)
                answers[response_id] = {item["id"]: item for item in output}
            if item_id not in answers[response_id]:
                raise NotFound(f"{field}.{i}.id: the response has no item {item_id[:120]!r}")
        except NotFound:
            if item_id.startswith(_IN_NO_PROMPT):
                continue
            raise
        resolved_items[i] = answers[response_id][item_id]
    return resolved_items


async def _load_answer(
    gateway: Gateway, tenant: str, response_id: str, param: str
) -> tuple[Form, list[Item]]:
    """Return a response that has ended with an answer, and its output items; raises NotFound,
    InvalidRequest."""
    form = await _find(gateway, tenant, response_id)
    call = await _answer_by_now(gateway, form)
    (stream,) = call.streams
    error = call_error(call)
    if error is not None or stream.end is None:
        why = "still in progress" if error is None else f"without an answer ({error.code})"
        raise InvalidRequest(
            f"{param}: expected a response that was answered, found one that is {why}", param
        )
    return form, form.items(stream, form.output_of(stream), COMPLETED)


async def settle(gateway: Gateway, tenant: str, conversation_id: str) -> None:
    """Add the items of a conversation's turns that have ended; raises BrokerUnavailable.

    A turn without an answer adds nothing. The table must have caught up with other gateways. A
    deletion of the conversation at the same time is completed here.
    """
    objects, table = gateway.objects, gateway.objects.table.conversations
    for turn in table.pending(tenant, conversation_id):
        items = await _turn_items(gateway, turn)
        if items is None or turn not in table.pending(tenant, conversation_id):
            continue  # in progress, or settled meanwhile
        if items:
            await objects.put(*stored_items(turn, items))
        await objects.drop(conversation_key(turn))
    if table.get(tenant, conversation_id) is None:
        await objects.drop(*table.keys_below(tenant, conversation_id))


async def _turn_items(gateway: Gateway, turn: PendingTurn) -> list[Item] | None:
    """Return the input and output items of a turn; none of one without an answer, None if it is in
    progress."""
    place = RecordPosition(turn.partition, turn.offset)
    try:
        record = await gateway.responses.get(turn.turn_id, place)
        is_stored = orjson.loads(record.options)["store"]
        name = gateway.response_ids.name(turn.turn_id, turn.tenant, place if is_stored else None)
        form = Form(name, record)
        call = await _answer_by_now(gateway, form)
    except NotFound:  # deleted, or older than what the log keeps
        return []
    if call_error(call) is not None:
        return []
    (stream,) = call.streams
    if stream.end is None:
        return None
    output: list[Item] = form.whole(call, form.output_of(stream), None)["output"]
    return [*orjson.loads(record.input), *output]


async def retrieve(gateway: Gateway, exchange: HttpExchange) -> str:
    """Send the response as it is now, or its events; return the outcome."""
    form, query = await _parse_call(
        gateway, exchange, ("stream", "starting_after", "include_obfuscation")
    )
    if _flag(query, "stream"):
        after = _number(query, "starting_after", -1, 0, _NUMBER_MAX)
        call = resumed_call(gateway, exchange, form.key(), [ClientPosition()])
        writer = ResponseEvents(form, call, after, keepalive=KEEPALIVE)
        return await read_on(gateway, exchange, call, writer, writer.skip)
    if "starting_after" in query:
        raise InvalidRequest("starting_after: needs stream=true", "starting_after")
    return await _send(exchange, form, await _answer_by_now(gateway, form))


async def cancel(gateway: Gateway, exchange: HttpExchange) -> str:
    """Cancel a response that runs in the background; one that has ended stays as it is."""
    form, _ = await _parse_call(gateway, exchange, ())
    if not form.is_background:
        raise InvalidRequest(
            f"response {form.response_id}: only one that was created with background=true can be "
            "cancelled; to end another, hang up"
        )
    call = await _answer_by_now(gateway, form)
    if call.open_streams and call_error(call) is None:
        await _give_up(gateway, form)
        call = await _answer_by_now(gateway, form, wait_ms=gateway.settings.accept_ms)
    return await _send(exchange, form, call)


async def delete(gateway: Gateway, exchange: HttpExchange) -> str:
    """Delete a response, and cancel it if it is being answered."""
    form, _ = await _parse_call(gateway, exchange, ())
    if wall_ms() < form.record.deadline_ms:
        await _give_up(gateway, form)
    if form.conversation_id:  # it keeps the items of the response
        await gateway.objects.catch_up()
        await settle(gateway, exchange.tenant, form.conversation_id)
    await gateway.responses.delete(form.record)
    answer = {"id": form.response_id, "object": "response", "deleted": True}
    await exchange.send_whole(orjson.dumps(answer), exchange.reply_headers)
    return COMPLETED


async def input_items(gateway: Gateway, exchange: HttpExchange) -> str:
    """Send the input items of the call, page by page."""
    form, query = await _parse_call(gateway, exchange, ("limit", "order", "after"))
    items: list[Any] = orjson.loads(form.record.input)
    order = query.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: expected asc or desc, found {order[:40]!r}", "order")
    after = query["after"][-1] if "after" in query else None
    rest = listed_from(items, [item["id"] for item in items], order, after)
    page = rest[: _number(query, "limit", _ITEMS, 1, _ITEMS_MAX)]
    answer = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(rest),
    }
    await exchange.send_whole(orjson.dumps(answer), exchange.reply_headers)
    return COMPLETED


def listed_from(
    items: Sequence[Listed], ids: Sequence[str], order: str, after: str | None
) -> Sequence[Listed]:
    """Return the items in this order, `asc` or `desc`, from behind the one with the id `after`.

    `ids` has the id of each item. Raises InvalidRequest if none is `after`.
    """
    if order == "desc":
        items, ids = items[::-1], ids[::-1]
    if after is None:
        return items
    if after not in ids:
        raise InvalidRequest(f"after: no such item: {after[:80]!r}", "after")
    return items[ids.index(after) + 1 :]


async def _parse_call(
    gateway: Gateway, exchange: HttpExchange, parameters: Sequence[str]
) -> tuple[Form, Mapping[str, list[str]]]:
    """Return the response in the path, and the query; raises NotFound, InvalidRequest."""
    exchange.reply_headers.append((b"x-request-id", new_request_id(exchange.arrived_ms).encode()))
    exchange.tenant = gateway.callers.keys.tenant(exchange.headers)
    text = exchange.scope["query_string"].decode("latin-1")
    try:
        query = parse_qs(text, keep_blank_values=True, max_num_fields=_PARAMETERS_MAX)
    except ValueError as error:
        raise InvalidRequest(f"expected at most {_PARAMETERS_MAX} parameters") from error
    for name in query:
        if name not in (*parameters, *_INCLUDED):
            raise InvalidRequest(f"{name[:40]}: unknown parameter; leave it out", name[:40])
    include = [value for name in _INCLUDED for value in query.get(name, ())]
    for value in include:
        check_include(value)
    form = await _find(gateway, exchange.tenant, exchange.scope["path_params"]["response_id"])
    record = replace(form.record, include=(*form.record.include, *include))
    return Form(form.response_id, record), query


async def _find(gateway: Gateway, tenant: str, response_id: str) -> Form:
    request_id, place = gateway.response_ids.parse(response_id, tenant)
    return Form(response_id, await gateway.responses.get(request_id, place))


def _flag(query: Mapping[str, list[str]], name: str) -> bool:
    value = query.get(name, ["false"])[-1]
    if value not in ("true", "false"):
        raise InvalidRequest(f"{name}: expected true or false, found {value[:40]!r}", name)
    return value == "true"


def _number(
    query: Mapping[str, list[str]], name: str, default: int, minimum: int, maximum: int
) -> int:
    if name not in query:
        return default
    text = query[name][-1]
    if not text.isascii() or not text.isdecimal() or len(text) > 16:
        raise InvalidRequest(f"{name}: expected a whole number, found {text[:40]!r}", name)
    if not minimum <= int(text) <= maximum:
        raise InvalidRequest(f"{name}: expected {minimum} to {maximum}, found {text}", name)
    return int(text)


async def _answer_by_now(gateway: Gateway, form: Form, *, wait_ms: int = 0) -> Call:
    """Read the answer from the log: up to now, or with `wait_ms` until it ends, for at most that
    long."""
    call = resumed_call(gateway, None, form.key(), [ClientPosition()], waits_for_end=True)
    gateway.calls.admit_resume(call.key.parent_id, call.key.tenant)
    gateway.calls.resumed.add(call)
    try:
        async with asyncio.timeout((wait_ms or RESUME_MS) / 1000):
            await _read(gateway, call, live=bool(wait_ms))
    except TimeoutError:
        if not wait_ms:
            raise BrokerUnavailable("the answer was not read in time; try again later") from None
    finally:
        gateway.calls.resumed.discard(call)
    late = wall_ms() > form.record.deadline_ms + DEADLINE_GRACE_MS
    if call.open_streams and call_error(call) is None and late:
        call.fail(DeadlineExceeded("the deadline passed and nobody ended the request"))
    return call


async def _read(gateway: Gateway, call: Call, *, live: bool) -> None:
    """Apply the frames that the log has, or with `live` all up to the answer's end.

    Of void marks that are read again, only those are reported that no attempt has followed, and
    ends of void attempts (`Hub.go_live`).
    """
    hub = Hub()
    hub.add(call)
    loop, key = asyncio.get_running_loop(), call.key
    async with aclosing(gateway.tokens.read_again(key.partition, key.offset, live=live)) as frames:
        async for frame in frames:
            hub.apply(frame, loop.time())
            if not call.open_streams or call_error(call) is not None:
                break
    hub.go_live(gateway.calls.hub.on_void)


async def _give_up(gateway: Gateway, form: Form) -> None:
    record = Cancellation(
        request_id=form.record.request_id,
        session_id=form.record.session_id,
        reason=CancelReason.CLIENT_REQUEST,
        at_ms=wall_ms(),
        tenant=form.record.tenant,
    )
    await gateway.calls.log.send(record)


async def _send(exchange: HttpExchange, form: Form, call: Call) -> str:
    await exchange.send_whole(whole_of(form, call), exchange.reply_headers)
    return COMPLETED

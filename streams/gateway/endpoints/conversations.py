"""The routes of /v1/conversations, and the conversation of a response.

`streams/openai/objects/conversations.py` says how turns are added, also at the same time.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request

from schemas.errors import InvalidRequest, NotFound, TooManyRequests, TriviumError
from schemas.records import PendingTurn, StoredConversation, StoredItem, StoredResponse
from streams.calls.ids import new_object_id, new_request_id
from streams.calls.request.responses_body import check_include
from streams.calls.stream.hub import DEADLINE_GRACE_MS
from streams.gateway.endpoints.stored_responses import listed_from, resolve_references, settle
from streams.gateway.state import Gateway
from streams.log.clock import wall_ms
from streams.log.retry import TRANSIENT_ERRORS
from streams.openai.objects.bodies import (
    ConversationBody,
    ConversationChangeBody,
    ConversationItemsBody,
    ItemPaging,
)
from streams.openai.objects.conversations import (
    PREFIX,
    ConversationTable,
    conversation_key,
    item_bytes,
    stored_items,
)
from streams.openai.objects.quota import check_room
from streams.openai.objects.shapes import metadata_text
from streams.openai.responses.call import EarlierTurns
from streams.openai.responses.items import Item, items_of, messages_of
from streams.openai.responses.response_id import RecordPosition

logger = logging.getLogger(__name__)
ITEMS_MAX = 2_048  # of a conversation, as of the messages in a call
BYTES_MAX = 4 << 20  # of a conversation's items: each response keeps those before it in one record
PENDING_MAX = 16  # turns of a conversation at the same time; a reader looks at each
ITEM_ID_CHARS_MAX = 256
SETTLE_S = 10.0
_ITEMS = "/v1/conversations/{conversation_id}/items"
_ITEM = _ITEMS + "/{item_id:path}"  # callers choose ids of items


def conversation_routes(gateway: Gateway, router: APIRouter) -> None:
    """Add the routes of /v1/conversations."""
    callers = gateway.callers

    @router.post("/v1/conversations", tags=["OpenAI"])
    async def create(request: Request) -> dict[str, Any]:
        """Create a conversation, with or without items."""
        body = await callers.read_body(request, ConversationBody)
        tenant, now_ms = callers.tenant_of(request), wall_ms()
        conversation = StoredConversation(
            conversation_id=new_object_id(PREFIX, now_ms),
            tenant=tenant,
            metadata=metadata_text(body.metadata),
            created_ms=now_ms,
        )
        items = await _new_items(gateway, conversation, body.items or ())
        await gateway.objects.put(conversation, *items)
        return _conversation_json(conversation)

    @router.get("/v1/conversations/{conversation_id}", tags=["OpenAI"])
    async def get_conversation(conversation_id: str, request: Request) -> dict[str, Any]:
        """Return a conversation without its items."""
        tenant = callers.tenant_of(request)
        return _conversation_json(_require(gateway, tenant, conversation_id))

    @router.post("/v1/conversations/{conversation_id}", tags=["OpenAI"])
    async def change(conversation_id: str, request: Request) -> dict[str, Any]:
        """Replace the metadata of a conversation."""
        body = await callers.read_body(request, ConversationChangeBody)
        conversation = _require(gateway, callers.tenant_of(request), conversation_id)
        conversation = replace(conversation, metadata=metadata_text(body.metadata))
        await gateway.objects.put(conversation)
        return _conversation_json(conversation)

    @router.delete("/v1/conversations/{conversation_id}", tags=["OpenAI"])
    async def delete(conversation_id: str, request: Request) -> dict[str, Any]:
        """Delete a conversation and its items; responses stay."""
        conversation = _require(gateway, callers.tenant_of(request), conversation_id)
        await gateway.objects.drop(conversation_key(conversation))
        # What other gateways added until then is in the table now; later, they delete it.
        table = gateway.objects.table.conversations
        await gateway.objects.drop(*table.keys_below(conversation.tenant, conversation_id))
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    _item_routes(gateway, router)


def _item_routes(gateway: Gateway, router: APIRouter) -> None:
    """Add the routes of a conversation's items."""
    callers = gateway.callers

    @router.post(_ITEMS, tags=["OpenAI"])
    async def add_items(conversation_id: str, request: Request) -> dict[str, Any]:
        """Add items to a conversation; the answer lists them in their order."""
        _check_included(request)
        body = await callers.read_body(request, ConversationItemsBody)
        conversation = await _require_settled(gateway, request, conversation_id)
        items = await _new_items(gateway, conversation, body.items)
        await gateway.objects.put(*items)
        return _page(items, has_more=False)

    @router.get(_ITEMS, tags=["OpenAI"])
    async def list_items(
        conversation_id: str, request: Request, paging: Annotated[ItemPaging, Query()]
    ) -> dict[str, Any]:
        """List the items of a conversation, the newest first, page by page."""
        _check_included(request)
        conversation = await _require_settled(gateway, request, conversation_id)
        items = _items_of(gateway, conversation)
        ids = [item.item_id for item in items]
        rest = listed_from(items, ids, paging.order, paging.after)
        page = rest[: paging.limit]
        return _page(page, has_more=len(page) < len(rest))

    @router.get(_ITEM, tags=["OpenAI"])
    async def get_item(conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
        """Return an item of a conversation."""
        _check_included(request)
        conversation = await _require_settled(gateway, request, conversation_id)
        return _item_json(_require_item(gateway, conversation, item_id))

    @router.delete(_ITEM, tags=["OpenAI"])
    async def delete_item(conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
        """Delete an item of a conversation; the answer is the conversation."""
        conversation = await _require_settled(gateway, request, conversation_id)
        item = _require_item(gateway, conversation, item_id)
        await gateway.objects.drop(conversation_key(item))
        return _conversation_json(conversation)


# The conversation of a response


async def turns_before(
    gateway: Gateway, tenant: str, conversation_id: str, items: Sequence[Item]
) -> EarlierTurns:
    """Return the turns of a conversation before a call that brings `items`.

    The conversation's id is the session of all its turns, so that each finds the KV of the earlier
    ones. Raises NotFound; InvalidRequest and TooManyRequests if the items do not fit.
    """
    await gateway.objects.catch_up()
    conversation = _require(gateway, tenant, conversation_id)
    await settle(gateway, tenant, conversation_id)
    if len(_table(gateway).pending(tenant, conversation_id)) >= PENDING_MAX:
        raise TooManyRequests(
            f"{conversation_id}: {PENDING_MAX} responses of this conversation are in progress; "
            "try again when they have ended"
        )
    _check_items(gateway, conversation, _turn(gateway, conversation, ""), items, "input")
    earlier = [orjson.loads(item.item) for item in _items_of(gateway, conversation)]
    return EarlierTurns(session_id=conversation_id, messages=messages_of(earlier))


async def begin_turn(
    gateway: Gateway, record: StoredResponse, place: RecordPosition, conversation_id: str
) -> None:
    """Write that the items of a stored call belong to a conversation once it is answered; raises
    BrokerUnavailable."""
    conversation = _require(gateway, record.tenant, conversation_id)
    turn = _turn(gateway, conversation, record.request_id)
    deadline_ms = record.deadline_ms + 2 * DEADLINE_GRACE_MS
    await gateway.objects.put(
        replace(turn, deadline_ms=deadline_ms, partition=place.partition, offset=place.offset)
    )


async def settle_forever(gateway: Gateway, is_first: Callable[[], bool]) -> None:
    """Add the turns that nobody reads, before the log loses their answers, until cancelled.

    One gateway does it. It also completes deletions that were interrupted.
    """
    while True:
        await asyncio.sleep(SETTLE_S)
        if not is_first():
            continue
        try:
            await settle_overdue(gateway)
        except (TriviumError, *TRANSIENT_ERRORS) as error:
            logger.warning("conversations: %s: %s; tried again", type(error).__name__, error)


async def settle_overdue(gateway: Gateway) -> None:
    """Add the turns whose deadline has passed, and delete what is left of deleted conversations."""
    await gateway.objects.catch_up()
    table = _table(gateway)
    for tenant, conversation_id in table.deleted_names():
        await gateway.objects.drop(*table.keys_below(tenant, conversation_id))
    for tenant, conversation_id in table.overdue_names(wall_ms()):
        await settle(gateway, tenant, conversation_id)


# Parts of these


def _table(gateway: Gateway) -> ConversationTable:
    return gateway.objects.table.conversations


def _require(gateway: Gateway, tenant: str, conversation_id: str) -> StoredConversation:
    conversation = _table(gateway).get(tenant, conversation_id)
    if conversation is None:
        raise NotFound(f"no such conversation: {conversation_id[:64]!r}")
    return conversation


async def _require_settled(
    gateway: Gateway, request: Request, conversation_id: str
) -> StoredConversation:
    tenant = gateway.callers.tenant_of(request)
    _require(gateway, tenant, conversation_id)
    await settle(gateway, tenant, conversation_id)
    return _require(gateway, tenant, conversation_id)


def _require_item(gateway: Gateway, conversation: StoredConversation, item_id: str) -> StoredItem:
    for item in _items_of(gateway, conversation):
        if item.item_id == item_id:
            return item
    raise NotFound(f"{conversation.conversation_id}: no such item: {item_id[:80]!r}")


def _items_of(gateway: Gateway, conversation: StoredConversation) -> list[StoredItem]:
    return _table(gateway).items(conversation.tenant, conversation.conversation_id)


def _turn(gateway: Gateway, conversation: StoredConversation, turn_id: str) -> PendingTurn:
    tenant, name, now_ms = conversation.tenant, conversation.conversation_id, wall_ms()
    return PendingTurn(
        conversation_id=name,
        tenant=tenant,
        turn_id=turn_id or new_request_id(now_ms),
        created_ms=_table(gateway).next_ms(tenant, name, now_ms),
        deadline_ms=0,
        partition=0,
        offset=0,
    )


async def _new_items(
    gateway: Gateway, conversation: StoredConversation, bodies: Sequence[Item]
) -> list[StoredItem]:
    """Return the records of items that a call adds; raises InvalidRequest, NotFound and
    TooManyRequests."""
    turn = _turn(gateway, conversation, "")
    items = items_of(bodies, turn.turn_id, "items")
    items = await resolve_references(gateway, conversation.tenant, items, "items")
    return _check_items(gateway, conversation, turn, items, "items")


def _check_items(
    gateway: Gateway,
    conversation: StoredConversation,
    turn: PendingTurn,
    items: Sequence[Item],
    field: str,
) -> list[StoredItem]:
    """Return the records of items that may be added; raises InvalidRequest, and TooManyRequests if
    conversations of the tenant take too much memory."""
    existing = _items_of(gateway, conversation)
    try:
        new = stored_items(turn, items)
    except TypeError as error:
        raise InvalidRequest(
            f"{field}: cannot be kept: {error}; store large numbers as text", field
        ) from error
    if len(existing) + len(new) > ITEMS_MAX:
        raise InvalidRequest(
            f"{field}: expected at most {ITEMS_MAX} items in a conversation, found "
            f"{len(existing)} and {len(new)} more; delete some, or begin another",
            field,
        )
    new_bytes = sum(map(item_bytes, new))
    if sum(map(item_bytes, existing)) + new_bytes > BYTES_MAX:
        raise InvalidRequest(
            f"{field}: expected at most {BYTES_MAX} bytes in a conversation, found "
            f"{new_bytes} beside those that it has; delete some, or begin another",
            field,
        )
    names = {item.item_id for item in existing}
    for i, item in enumerate(new):
        if len(item.item_id) > ITEM_ID_CHARS_MAX:
            raise InvalidRequest(
                f"{field}.{i}.id: expected at most {ITEM_ID_CHARS_MAX} characters, found "
                f"{len(item.item_id)}",
                f"{field}.{i}.id",
            )
        if item.item_id in names:
            raise InvalidRequest(
                f"{field}.{i}.id: expected ids that the conversation does not have yet, found "
                f"{item.item_id[:80]!r} again; leave the id or the item out",
                f"{field}.{i}.id",
            )
        names.add(item.item_id)
    settings = gateway.settings
    limit = settings.conversations_bytes_max // settings.tenants
    stored_bytes = _table(gateway).bytes_of(conversation.tenant)
    check_room(stored_bytes, new_bytes, limit, "bytes of your conversations")
    return new


def _conversation_json(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": conversation.created_ms // 1000,
        "metadata": json.loads(conversation.metadata or "{}"),
    }


def _check_included(request: Request) -> None:
    """Raise InvalidRequest for a field that OpenAI's items do not have; all others are there."""
    query = request.query_params
    for name in (*query.getlist("include"), *query.getlist("include[]")):
        check_include(name)


def _item_json(item: StoredItem) -> dict[str, Any]:
    """Return an item as callers see it, with all that is kept of it."""
    item_json: dict[str, Any] = orjson.loads(item.item)
    return item_json


def _page(items: Sequence[StoredItem], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [_item_json(item) for item in items],
        "first_id": items[0].item_id if items else "",  # no null in OpenAI's type
        "last_id": items[-1].item_id if items else "",
        "has_more": has_more,
    }

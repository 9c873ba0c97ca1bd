"""Conversations as the log has them: their records, items, and turns that have not ended. Pure.

Theory of operation. No record of a conversation is changed by two writers: each item has its own
key, so gateways append at the same time and lose nothing. A response that has a conversation first
gets a `PendingTurn`, which says where its call is on the log. Once the answer has ended, any
gateway that reads the conversation writes the items of the turn, and then deletes the pending turn
(`settle` in `streams/gateway/endpoints/stored_responses.py`). Items follow from the log alone, so
two gateways that do this write the same. A response without an answer adds nothing.

Turns at the same time are not locked out: each sees the items of turns that ended before it began,
and all of them are added. Turns are ordered by when their calls began, not by when they ended.
Items of one turn stay together. A call that began after another was answered is always later, even
if the clock of its gateway is behind (`next_ms`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from schemas.records import PendingTurn, StoredConversation, StoredItem
from schemas.topics import object_key

PREFIX = "conv_"
_REFERENCE = "item_reference"
_ENDED: dict[str, Any] = {"status": "completed"}
# Fields of OpenAI's items that callers may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("function_call", "function_call_output"), _ENDED),
    **dict.fromkeys(("custom_tool_call", "custom_tool_call_output"), _ENDED),
    "reasoning": {"summary": []},
}
ITEM_BYTES = 1_024  # overhead of an item in memory, besides its text
Place = tuple[str, int]  # of an item: its turn, and its number there


def conversation_key(record: StoredConversation | StoredItem | PendingTurn) -> str:
    """Build the key of a record; no part of it was chosen by the caller."""
    names = [record.conversation_id]
    if isinstance(record, StoredItem | PendingTurn):
        names.append(record.turn_id)
    if isinstance(record, StoredItem):
        names.append(str(record.number))
    return object_key(record.tenant, *names)


@dataclass(slots=True)
class _Contents:
    """A conversation, and what its log has; parts stay until their own keys are deleted."""

    record: StoredConversation | None = None
    items: dict[Place, StoredItem] = field(default_factory=dict)
    pending: dict[str, PendingTurn] = field(default_factory=dict)

    def is_empty(self) -> bool:
        return self.record is None and not self.items and not self.pending


class ConversationTable:
    """The conversations of all tenants, by tenant and id."""

    def __init__(self) -> None:
        self._contents: dict[tuple[str, str], _Contents] = {}
        self._unsettled: dict[tuple[str, str], None] = {}  # with pending turns, or deleted
        self._bytes: Counter[str] = Counter()  # of items, by tenant

    def set(self, record: StoredConversation | StoredItem | PendingTurn) -> None:
        """Apply a record; the last record of a key counts."""
        name = record.tenant, record.conversation_id
        contents = self._contents.setdefault(name, _Contents())
        match record:
            case StoredConversation():
                contents.record = record
            case StoredItem():
                place = record.turn_id, record.number
                self._count(record.tenant, contents.items.get(place), record)
                contents.items[place] = record
            case PendingTurn():
                contents.pending[record.turn_id] = record
        self._update_unsettled(name, contents)

    def drop(self, tenant: str, conversation_id: str, *rest: str) -> None:
        """Remove the conversation, the pending turn or the item whose key was deleted."""
        name = tenant, conversation_id
        if (contents := self._contents.get(name)) is None:
            return
        match rest:
            case []:
                contents.record = None
            case [turn_id]:
                contents.pending.pop(turn_id, None)
            case [turn_id, number] if number.isdecimal():
                self._count(tenant, contents.items.pop((turn_id, int(number)), None), None)
        self._update_unsettled(name, contents)
        if contents.is_empty():
            del self._contents[name]

    def _count(self, tenant: str, old: StoredItem | None, new: StoredItem | None) -> None:
        self._bytes[tenant] += item_bytes(new) - item_bytes(old)
        if not self._bytes[tenant]:
            del self._bytes[tenant]

    def _update_unsettled(self, name: tuple[str, str], contents: _Contents) -> None:
        if not contents.is_empty() and (contents.pending or contents.record is None):
            self._unsettled[name] = None
        else:
            self._unsettled.pop(name, None)

    def get(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """Return a conversation by tenant and id."""
        contents = self._contents.get((tenant, conversation_id))
        return None if contents is None else contents.record

    def items(self, tenant: str, conversation_id: str) -> list[StoredItem]:
        """Return the items of a conversation in their order."""
        contents = self._contents.get((tenant, conversation_id)) or _Contents()
        return sorted(
            contents.items.values(), key=lambda item: (item.created_ms, item.turn_id, item.number)
        )

    def pending(self, tenant: str, conversation_id: str) -> list[PendingTurn]:
        """Return the turns of a conversation that have not been added, the oldest first."""
        contents = self._contents.get((tenant, conversation_id)) or _Contents()
        return sorted(contents.pending.values(), key=lambda turn: (turn.created_ms, turn.turn_id))

    def next_ms(self, tenant: str, conversation_id: str, now_ms: int) -> int:
        """Return the time of a turn that begins now: later than all that are known."""
        contents = self._contents.get((tenant, conversation_id)) or _Contents()
        times = [item.created_ms for item in contents.items.values()]
        times += [turn.created_ms for turn in contents.pending.values()]
        return max(now_ms, max(times, default=0) + 1)

    def bytes_of(self, tenant: str) -> int:
        """Return the bytes of a tenant's items in memory."""
        return self._bytes[tenant]

    def keys_below(self, tenant: str, conversation_id: str) -> list[str]:
        """Return the keys of the items and pending turns of a conversation."""
        contents = self._contents.get((tenant, conversation_id)) or _Contents()
        keys = [conversation_key(item) for item in contents.items.values()]
        return keys + [conversation_key(turn) for turn in contents.pending.values()]

    def deleted_names(self) -> Iterator[tuple[str, str]]:
        """Iterate over tenants and ids of deleted conversations that have parts left."""
        return (name for name in list(self._unsettled) if self.get(*name) is None)

    def overdue_names(self, now_ms: int) -> Iterator[tuple[str, str]]:
        """Iterate over tenants and ids of conversations with a pending turn that is over."""
        for name in list(self._unsettled):
            if any(turn.deadline_ms < now_ms for turn in self.pending(*name)):
                yield name


def stored_items(turn: PendingTurn, items: Sequence[dict[str, Any]]) -> list[StoredItem]:
    """Build the records of a turn's items. References without an item are left out."""
    return [
        StoredItem(
            conversation_id=turn.conversation_id,
            tenant=turn.tenant,
            turn_id=turn.turn_id,
            number=number,
            item_id=item["id"],
            created_ms=turn.created_ms,
            item=orjson.dumps(_DEFAULTS.get(item["type"], {}) | item).decode(),
        )
        for number, item in enumerate(items)
        if item["type"] != _REFERENCE
    ]


def item_bytes(item: StoredItem | None) -> int:
    """Return the bytes that an item takes in memory."""
    return 0 if item is None else ITEM_BYTES + len(item.item)

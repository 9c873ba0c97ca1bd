"""The table of conversations: order, bytes, and what is left of deleted ones."""

from dataclasses import replace

from schemas.records import PendingTurn, StoredConversation, StoredItem
from streams.openai.objects.conversations import item_bytes, stored_items
from streams.openai.objects.table import ObjectTable, key_of

CONVERSATION = StoredConversation(conversation_id="conv_1", tenant="t", created_ms=1)
TURN = PendingTurn(
    conversation_id="conv_1",
    tenant="t",
    turn_id="r1",
    created_ms=20,
    deadline_ms=90,
    partition=1,
    offset=2,
)
MESSAGE = {"type": "message", "id": "a/b", "role": "user", "content": []}


def items_of(turn: PendingTurn, count: int = 1) -> list[StoredItem]:
    return stored_items(turn, [MESSAGE | {"id": f"a/{i}"} for i in range(count)])


def table_of(*records: StoredConversation | StoredItem | PendingTurn) -> ObjectTable:
    table = ObjectTable()
    for record in records:
        table.apply(key_of(record), record)
    return table


def test_items_are_ordered_by_turn_and_number_whenever_they_were_written() -> None:
    early, late = replace(TURN, turn_id="r2", created_ms=10), TURN
    records = [*items_of(late, 12), *items_of(early, 2)]
    table = table_of(*records, CONVERSATION)
    expected = [("r2", 0), ("r2", 1), *(("r1", i) for i in range(12))]
    items = table.conversations.items("t", "conv_1")
    assert [(item.turn_id, item.number) for item in items] == expected
    assert table.conversations.items("u", "conv_1") == []
    assert table.objects_of("t") == 1, "items are not counted as objects"
    assert table.conversations.next_ms("t", "conv_1", 15) == 21, "the clock is behind"
    assert table.conversations.next_ms("t", "conv_1", 99) == 99


def test_item_that_is_written_again_counts_once() -> None:
    (item,) = items_of(TURN)
    table = table_of(CONVERSATION, item, item)
    assert table.conversations.bytes_of("t") == item_bytes(item)
    table.apply(key_of(item), None)
    table.apply(key_of(item), None)
    assert table.conversations.bytes_of("t") == 0 and not table.conversations.items("t", "conv_1")


def test_parts_of_deleted_conversation_are_reported_until_they_are_gone() -> None:
    (item,) = items_of(TURN)
    table = table_of(CONVERSATION, item, TURN)
    conversations = table.conversations
    assert list(conversations.deleted_names()) == []
    assert list(conversations.overdue_names(90)) == []
    assert list(conversations.overdue_names(91)) == [("t", "conv_1")]
    table.apply(key_of(CONVERSATION), None)
    assert conversations.get("t", "conv_1") is None
    assert list(conversations.deleted_names()) == [("t", "conv_1")]
    keys = conversations.keys_below("t", "conv_1")
    assert keys == ["t/conv_1/r1/0", "t/conv_1/r1"]
    for key in keys:
        table.apply(key, None)
    assert not len(table) and list(conversations.deleted_names()) == []


def test_stored_items_complete_what_callers_leave_out() -> None:
    call = {"type": "function_call", "id": "c", "call_id": "x", "name": "f", "arguments": ""}
    records = stored_items(TURN, [call, {"type": "item_reference", "id": "rs_1"}, MESSAGE])
    assert [(record.number, record.item_id) for record in records] == [(0, "c"), (2, "a/b")]
    assert '"status":"completed"' in records[0].item


def test_unknown_keys_change_nothing() -> None:
    table = table_of(CONVERSATION)
    for key in ("t/conv_2", "t/conv_1/r1", "t/conv_1/r1/x", "t/conv_1/r1/0/more"):
        table.apply(key, None)
    assert table.conversations.get("t", "conv_1") == CONVERSATION

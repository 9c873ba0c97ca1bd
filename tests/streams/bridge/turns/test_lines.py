"""Whose a prompt is, and whether anybody waits for it."""

from schemas.errors import NotReady
from streams.bridge.turns.lines import BatchLines
from streams.gateway.objects.batches import line_key
from streams.gateway.objects.table import ObjectTable, key_of
from tests.streams.bridge.samples import record
from tests.streams.gateway.batches.test_turns import batch

LINES = "rows"  # the topic of the samples


def test_lines_are_their_tenants_and_other_prompts_their_topics() -> None:
    bobs = record({}, key=line_key(batch("bob", 1), 7, "a/b").encode())
    assert BatchLines(LINES, ObjectTable).owner(bobs) == "rows/bob"
    assert BatchLines(LINES, ObjectTable).tenant(bobs) == "bob"
    other = BatchLines("batch.prompts", ObjectTable)
    assert (other.owner(bobs), other.tenant(bobs)) == ("rows/", "")
    for key, tenant in ((None, ""), (b"\xff/batch_1/0/c", "\ufffd")):
        assert BatchLines(LINES, ObjectTable).tenant(record({}, key=key)) == tenant, (
            "no line of ours"
        )


def test_a_cancelled_batch_is_waited_for_by_nobody() -> None:
    table, made = ObjectTable(), batch("bob", 1)
    line = record({}, key=line_key(made, 7, "a").encode())
    lines = BatchLines(LINES, lambda: table)
    assert not lines.is_given_up(line), "a batch that is not read yet"
    table.apply(key_of(made), made)
    assert lines.is_given_up(line), "its time is over"
    assert not BatchLines("batch.prompts", lambda: table).is_given_up(line)

    def unknown() -> ObjectTable:
        raise NotReady("still reading")

    assert not BatchLines(LINES, unknown).is_given_up(line)

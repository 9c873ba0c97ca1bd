"""Whose a prompt is, and whether anybody waits for it."""

from schemas.errors import NotReady
from streams.bridge.turns.lines import BatchLines
from streams.openai.objects.batches import line_key
from streams.openai.objects.table import ObjectTable, key_of
from tests.streams.bridge.samples import record
from tests.streams.openai.batches.test_turns import batch

LINES = "rows"  # the topic of the samples


def test_batch_lines_belong_to_tenant_and_prompts_to_topic() -> None:
    bobs = record({}, key=line_key(batch("bob", 1), 7, "a/b").encode())
    assert BatchLines(LINES, ObjectTable).owner(bobs) == "rows/bob"
    assert BatchLines(LINES, ObjectTable).tenant(bobs) == "bob"
    batch_lines = BatchLines("batch.prompts", ObjectTable)
    assert (batch_lines.owner(bobs), batch_lines.tenant(bobs)) == ("rows/", "")
    for key, tenant in ((None, ""), (b"\xff/batch_1/0/c", "\ufffd")):
        assert BatchLines(LINES, ObjectTable).tenant(record({}, key=key)) == tenant, (
            "no line of ours"
        )


def test_batch_lines_of_cancelled_batch_are_abandoned() -> None:
    table, sample_batch = ObjectTable(), batch("bob", 1)
    line = record({}, key=line_key(sample_batch, 7, "a").encode())
    lines = BatchLines(LINES, lambda: table)
    assert not lines.is_given_up(line), "a batch that is not read yet"
    table.apply(key_of(sample_batch), sample_batch)
    assert lines.is_given_up(line), "its time is over"
    assert not BatchLines("batch.prompts", lambda: table).is_given_up(line)

    def unknown() -> ObjectTable:
        raise NotReady("still reading")

    assert not BatchLines(LINES, unknown).is_given_up(line)

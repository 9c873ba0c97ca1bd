"""What connectors are told where the default would be wrong."""

import json
import re
from pathlib import Path

from infra.platform.connect.connectors import Database, file_sink, keys_with_schemas, sink, source
from infra.platform.demo import PREFIX
from infra.platform.tables import COLUMNS, DOCUMENTS_PUBLICATION, SINK_ROLE, SOURCE_ROLE

DATABASE = Database(host="db", port=5432, name="app", user="me", password="p")


def test_a_source_reads_one_table_in_its_own_way() -> None:
    made = source(
        DATABASE, "documents", publication="pub", slot="slot", partitions=2, prefix="rows"
    )
    assert made["table.include.list"] == "public.documents"
    assert (made["slot.name"], made["publication.name"]) == ("slot", "pub")
    # a deleted row is an empty value, and no change waits for half a second
    assert made["transforms.unwrap.delete.tombstone.handling.mode"] == "delete-to-tombstone"
    assert made["poll.interval.ms"] == "10"
    # two connectors with one prefix wait for each other's metrics
    assert made["topic.prefix"] == "slot"
    assert made["transforms.route.regex"] == r"slot\.public\.(.*)"
    assert made["transforms.route.replacement"] == "rows.$1"
    assert "key.converter" not in made
    assert keys_with_schemas(made)["key.converter.schemas.enable"] == "true"


def test_a_sink_fills_the_columns_that_it_is_told() -> None:
    made = sink(
        DATABASE, "rows.answers", table="questions", columns={"text": "answer", "ended_ms": "at"}
    )
    assert made["connection.url"] == "jdbc:postgresql://db:5432/app"
    assert made["transforms.columns.include"] == "text,ended_ms"
    assert made["transforms.columns.renames"] == "text:answer,ended_ms:at"
    # a record without a schema would fail late, and an answer that is not committed is none
    assert made["key.converter.schemas.enable"] == made["value.converter.schemas.enable"] == "true"
    assert made["consumer.override.isolation.level"] == "read_committed"
    assert (made["insert.mode"], made["primary.key.mode"]) == ("update", "record_key")


def test_a_file_gets_what_the_json_converter_reads() -> None:
    made = file_sink(["a", "b"], "out.txt", schemas=False)
    assert (made["topics"], made["value.converter.schemas.enable"]) == ("a,b", "false")


def test_the_page_shows_what_the_demo_tells_its_connectors() -> None:
    """infra/docs/integrate.md: but for names of hosts, roles and columns."""
    page = (Path(__file__).parents[4] / "infra" / "docs" / "integrate.md").read_text()
    shown = {
        name: json.loads(text)
        for name, text in re.findall(
            r"<!-- connector: (\w+) -->\n\n```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL
        )
    }
    reader, writer = (
        Database(host="db", port=5432, name="app", user=user, password="…")
        for user in (SOURCE_ROLE, SINK_ROLE)
    )
    columns = {"text": "answer", "error_message": "error"}
    assert columns.items() <= COLUMNS.items()
    assert shown == {
        "documents": source(
            reader, "documents", publication=DOCUMENTS_PUBLICATION, slot="documents",
            partitions=2, prefix=PREFIX,
        ),
        "answers": sink(writer, f"{PREFIX}.answers", table="questions", columns=columns),
    }  # fmt: skip

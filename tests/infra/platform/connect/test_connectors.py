"""What connectors are told where the default would be wrong."""

import json
import re
from pathlib import Path

from infra.platform.connect.connectors import Database, file_sink, keys_with_schemas, sink, source
from infra.platform.demo import PREFIX
from infra.platform.tables import COLUMNS, DOCUMENTS_PUBLICATION, SINK_ROLE, SOURCE_ROLE

DATABASE = Database(host="db", port=5432, name="app", user="me", password="p")


def test_source_config_covers_one_table() -> None:
    config = source(
        DATABASE, "documents", publication="pub", slot="slot", partitions=2, prefix="rows"
    )
    assert config["table.include.list"] == "public.documents"
    assert (config["slot.name"], config["publication.name"]) == ("slot", "pub")
    # a deleted row is an empty value, and no change waits for half a second
    assert config["transforms.unwrap.delete.tombstone.handling.mode"] == "delete-to-tombstone"
    assert config["poll.interval.ms"] == "10"
    # two connectors with one prefix wait for each other's metrics
    assert config["topic.prefix"] == "slot"
    assert config["transforms.route.regex"] == r"slot\.public\.(.*)"
    assert config["transforms.route.replacement"] == "rows.$1"
    assert "key.converter" not in config
    assert keys_with_schemas(config)["key.converter.schemas.enable"] == "true"


def test_sink_config_maps_columns() -> None:
    config = sink(
        DATABASE, "rows.answers", table="questions", columns={"text": "answer", "ended_ms": "at"}
    )
    assert config["connection.url"] == "jdbc:postgresql://db:5432/app"
    assert config["transforms.columns.include"] == "text,ended_ms"
    assert config["transforms.columns.renames"] == "text:answer,ended_ms:at"
    # a record without a schema would fail late, and an answer that is not committed is none
    assert (
        config["key.converter.schemas.enable"] == config["value.converter.schemas.enable"] == "true"
    )
    assert config["consumer.override.isolation.level"] == "read_committed"
    assert (config["insert.mode"], config["primary.key.mode"]) == ("update", "record_key")


def test_file_sink_config_names_topics_and_converter() -> None:
    config = file_sink(["a", "b"], "out.txt", schemas=False)
    assert (config["topics"], config["value.converter.schemas.enable"]) == ("a,b", "false")


def test_page_shows_connector_configs_of_demo() -> None:
    """infra/docs/integrate.md shows them with other hosts, roles and columns."""
    page = (Path(__file__).parents[4] / "infra" / "docs" / "integrate.md").read_text()
    page_configs = {
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
    assert page_configs == {
        "documents": source(
            reader, "documents", publication=DOCUMENTS_PUBLICATION, slot="documents",
            partitions=2, prefix=PREFIX,
        ),
        "answers": sink(writer, f"{PREFIX}.answers", table="questions", columns=columns),
    }  # fmt: skip

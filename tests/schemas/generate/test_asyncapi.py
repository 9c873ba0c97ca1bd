"""The AsyncAPI document: its shape, its references, and that the committed copy is current."""

import json
from collections.abc import Iterator
from typing import Any

import avro.schema
import pytest

from schemas.generate.asyncapi import ASYNCAPI_FILE, AVRO_FORMAT, asyncapi_document, asyncapi_text
from schemas.settings import LogSettings
from schemas.topics import TOPICS

DOCUMENT = asyncapi_document()


def references(node: Any) -> Iterator[str]:
    """Every $ref outside of Avro schemas."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for key, value in node.items():
            if key != "schema":
                yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def resolve(reference: str) -> Any:
    node: Any = DOCUMENT
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


def test_committed_asyncapi_document_is_current() -> None:
    assert ASYNCAPI_FILE.read_text() == asyncapi_text(), "run `make schemas`; commit it"


def test_asyncapi_document_has_required_parts() -> None:
    assert DOCUMENT["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= set(DOCUMENT["info"])
    for server in DOCUMENT["servers"].values():
        assert {"host", "protocol"} <= set(server)
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


def test_asyncapi_references_resolve() -> None:
    reference_list = list(references(DOCUMENT))
    assert reference_list
    for reference in reference_list:
        assert resolve(reference)


def test_asyncapi_has_channel_and_dead_letter_channel_per_topic() -> None:
    names = {name + suffix for name in TOPICS for suffix in ("", ".dlq")}
    assert set(DOCUMENT["channels"]) == names
    for name, channel in DOCUMENT["channels"].items():
        assert channel["address"] == channel["bindings"]["kafka"]["topic"] == name
        assert channel["messages"] and channel["description"]


@pytest.mark.parametrize("topic", TOPICS.values(), ids=lambda t: t.name)
def test_asyncapi_channel_matches_topic_table(topic: Any) -> None:
    channel = DOCUMENT["channels"][topic.name]
    kafka = channel["bindings"]["kafka"]
    assert tuple(channel["messages"]) == topic.records
    assert kafka["partitions"] == LogSettings().partitions(topic.group)
    assert kafka["topicConfiguration"]["cleanup.policy"] == topic.cleanup.split(",")
    assert kafka["topicConfiguration"]["retention.ms"] == topic.retention_ms


def test_asyncapi_operations_carry_only_messages_of_their_channel() -> None:
    for name, operation in DOCUMENT["operations"].items():
        actor, action, topic = name.split(".", 2)
        assert operation["action"] == action in ("send", "receive")
        channel = operation["channel"]["$ref"]
        assert channel == f"#/channels/{topic}"
        assert all(m["$ref"].startswith(channel + "/messages/") for m in operation["messages"])
        side = TOPICS[topic].written_by if action == "send" else TOPICS[topic].read_by
        assert actor in side


def test_asyncapi_payloads_parse_as_avro() -> None:
    for name, message in DOCUMENT["components"]["messages"].items():
        if name == "DeadLetter":
            continue
        assert message["payload"]["schemaFormat"] == AVRO_FORMAT
        assert (
            avro.schema.parse(json.dumps(message["payload"]["schema"])).fullname == message["name"]
        )


def test_asyncapi_document_reflects_settings() -> None:
    document = asyncapi_document(LogSettings(topic_prefix="dev.", session_partitions=9))
    channel = document["channels"]["requests"]
    assert channel["address"] == "dev.requests"
    assert channel["bindings"]["kafka"]["partitions"] == 9

"""Generates an AsyncAPI 3 document of the topic table: channels, operations and Avro messages.

Generated, never edited: `make schemas` rewrites the committed copy, and a test compares the two.
Partition counts are the defaults of the settings.
"""

import json
from pathlib import Path
from typing import Any

from schemas.codec import full_schema
from schemas.settings import LogSettings
from schemas.topics import (
    DEAD_LETTER_HEADERS,
    DEAD_LETTER_SUFFIX,
    RETRIED,
    SENT_AGAIN,
    TOPICS,
    Topic,
)

ASYNCAPI_FILE = Path(__file__).parents[1] / "asyncapi.json"
DOCUMENT_VERSION = "1.0.0"
KAFKA_BINDING = "0.5.0"
AVRO_FORMAT = "application/vnd.apache.avro+json;version=1.9.0"
CONTENT_TYPE = "avro/binary"
DEAD_LETTER = "DeadLetter"
Json = dict[str, Any]

_DESCRIPTION = (
    "All topics of Trivium. Values are Avro in single-object encoding "
    "(C3 01, CRC-64-AVRO fingerprint, body), or in Confluent wire format where a schema registry "
    "is configured. Topic names may have a prefix."
)
_HEADERS: Json = {
    "type": "object",
    "properties": {
        "traceparent": {"type": "string", "description": "W3C trace context of the client"},
        **{
            f"ce_{name}": {"type": "string", "description": f"CloudEvents attribute {name}"}
            for name in ("specversion", "type", "source", "id", "time")
        },
    },
}
_DEAD_LETTER_HEADERS: Json = {
    "type": "object",
    "properties": {
        DEAD_LETTER_HEADERS + name: {"type": "string", "description": text}
        for name, text in (
            ("error-class", "class of the error"),
            ("error-code", "its stable name, if the record was a prompt"),
            ("error-message", "what was expected, and what was found"),
            ("error-retriable", "whether the same prompt may succeed later"),
            ("topic", "topic of the record"),
            ("partition", "partition of the record"),
            ("offset", "offset of the record"),
            ("timestamp", "timestamp of the record, in ms"),
            ("attempts", "number of attempts at a prompt"),
            ("worker", "worker of its last attempt"),
            ("reason", "why the router chose that worker"),
            ("request-id", "request of its last attempt"),
            (SENT_AGAIN, "how often the record was sent again after it was a dead letter"),
            (RETRIED, "of a mark without a value: offset of the dead letter that was sent again"),
        )
    },
}


def asyncapi_document(settings: LogSettings | None = None) -> Json:
    """Return the whole document as plain JSON."""
    log = settings or LogSettings()
    names = sorted({record for topic in TOPICS.values() for record in topic.records})
    channels: Json = {}
    operations: Json = {}
    for topic in TOPICS.values():
        channels[topic.name] = _channel(topic, log)
        channels[topic.name + DEAD_LETTER_SUFFIX] = _dead_letter_channel(topic, log)
        operations |= _operations(topic)
    messages = {name: _message(name) for name in names}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Trivium",
            "version": DOCUMENT_VERSION,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {"broker": {"host": log.bootstrap, "protocol": "kafka"}},
        "channels": channels,
        "operations": operations,
        "components": {"messages": {**messages, DEAD_LETTER: _dead_letter_message()}},
    }


def _channel(topic: Topic, log: LogSettings) -> Json:
    configuration: Json = {
        "cleanup.policy": topic.cleanup.split(","),
        "retention.ms": topic.retention_ms,
    }
    return {
        "address": log.topic_prefix + topic.name,
        "description": topic.doc,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in topic.records},
        "bindings": {"kafka": _binding(topic, topic.name, log, configuration)},
        "x-key": topic.key,
        "x-partition-by": topic.partition_by,
    }


def _dead_letter_channel(topic: Topic, log: LogSettings) -> Json:
    name = topic.name + DEAD_LETTER_SUFFIX
    configuration = {"cleanup.policy": ["delete"], "retention.ms": topic.retention_ms}
    return {
        "address": log.topic_prefix + name,
        "description": f"Records of {topic.name} that a reader could not use.",
        "messages": {DEAD_LETTER: {"$ref": f"#/components/messages/{DEAD_LETTER}"}},
        "bindings": {"kafka": _binding(topic, name, log, configuration)},
    }


def _binding(topic: Topic, name: str, log: LogSettings, configuration: Json) -> Json:
    return {
        "topic": log.topic_prefix + name,
        "partitions": log.partitions(topic.group),
        "replicas": log.replication_factor,
        "topicConfiguration": configuration,
        "bindingVersion": KAFKA_BINDING,
    }


def _operations(topic: Topic) -> Json:
    operations: Json = {}
    for action, actors in (("send", topic.written_by), ("receive", topic.read_by)):
        for actor in actors:
            operations[f"{actor}.{action}.{topic.name}"] = {
                "action": action,
                "channel": {"$ref": f"#/channels/{topic.name}"},
                "title": f"{actor} {'writes' if action == 'send' else 'reads'} {topic.name}",
                "messages": [
                    {"$ref": f"#/channels/{topic.name}/messages/{name}"} for name in topic.records
                ],
                "tags": [{"name": actor}],
            }
    return operations


def _message(name: str) -> Json:
    schema = full_schema(name)
    return {
        "name": f"trivium.{name}",
        "title": name,
        "summary": schema["doc"],
        "contentType": CONTENT_TYPE,
        "headers": _HEADERS,
        "payload": {"schemaFormat": AVRO_FORMAT, "schema": schema},
    }


def _dead_letter_message() -> Json:
    return {
        "name": DEAD_LETTER,
        "title": "Dead letter",
        "summary": "Key and value of a record as they were; headers have its origin and the error.",
        "contentType": "application/octet-stream",
        "headers": _DEAD_LETTER_HEADERS,
        "payload": {"type": "string", "format": "binary"},
    }


def asyncapi_text() -> str:
    """Return the text of the committed AsyncAPI document."""
    return json.dumps(asyncapi_document(), indent=2) + "\n"


if __name__ == "__main__":
    ASYNCAPI_FILE.write_text(asyncapi_text())

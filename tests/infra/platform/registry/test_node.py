"""A real schema registry: what it takes, refuses and gives, and stock serializers."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema as StockSchema
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.serialization import MessageField, SerializationContext

from infra.platform.registry.node import running_apicurio
from schemas.codec import Codec, full_schema, to_dict
from schemas.errors import ConfigError
from schemas.records import Prompt
from schemas.settings import LogSettings
from streams.log.registry import NotRegistered, Registry, make_codec, register_all, subjects
from tests.infra.cli.trivium_runner import trivium_here
from tests.schemas.examples import example

PATIENT: Any = {"timeout_ms": 60_000}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    try:
        with running_apicurio() as registry_url:
            yield registry_url
    except ConfigError as error:  # no Java, or it is not installed: the message says which
        pytest.skip(str(error))


@pytest.fixture
def stock(url: str) -> Iterator[SchemaRegistryClient]:
    """The client of Confluent's Python package."""
    with closing(SchemaRegistryClient({"url": url})) as client:
        yield client


def log(url: str, prefix: str = "") -> LogSettings:
    return LogSettings(schema_registry=url, topic_prefix=prefix, request_timeout_ms=60_000)


def place(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def test_registry_returns_every_registered_schema(url: str) -> None:
    ids = register_all(url, **PATIENT)
    assert set(ids) == set(subjects()) and register_all(url, **PATIENT) == ids
    assert len(set(ids.values())) == len(set(subjects().values())), "one id for each schema"
    registry = Registry(url, **PATIENT)
    assert subjects().keys() <= registry.subjects()
    for subject, record in subjects().items():
        assert registry.fetch(ids[subject]) == full_schema(record)
    (version,) = registry.versions("prompts-value")
    assert (version.number, version.schema_id) == (1, ids["prompts-value"])
    assert registry.versions("nobodys-value") == []
    with pytest.raises(NotRegistered):
        registry.fetch(1_000_000)


def test_registry_refuses_incompatible_schema(url: str) -> None:
    """It must be compatible with all earlier versions, not only with the last one."""
    registry, subject = Registry(url, **PATIENT), "changing-value"
    schema = full_schema("Usage")
    new_field = {"name": "more", "type": "string"}
    first = registry.register(subject, {**schema, "fields": schema["fields"][:-1]})
    second = registry.register(
        subject, {**schema, "fields": [*schema["fields"], {**new_field, "default": ""}]}
    )
    assert first != second
    with pytest.raises(ConfigError, match=f"schema of {subject}: .* answered 409"):
        registry.register(subject, {**schema, "fields": [*schema["fields"], new_field]})


def test_stock_serializer_writes_prompts_and_reads_answers(
    url: str, stock: SchemaRegistryClient
) -> None:
    """Stock clients without a schema find it under Kafka's default subject name."""
    codec = make_codec(log(url))
    serialize = AvroSerializer(
        stock,
        stock.get_latest_version("prompts-value").schema,
        conf={"auto.register.schemas": False, "use.latest.version": True},
    )
    value = serialize({"text": "Why is the sky blue?"}, place("prompts"))
    assert codec.decode(value) == Prompt(text="Why is the sky blue?")

    answer = example("trivium.Answer")
    read = AvroDeserializer(stock)(codec.encode(answer), place("answers"))
    assert read == to_dict(answer)


def test_registry_fetches_foreign_schema_by_id(url: str, stock: SchemaRegistryClient) -> None:
    """A stock serializer registers the schema while it writes."""
    row = {"type": "record", "name": "Ticket", "fields": [{"name": "body", "type": "string"}]}
    serialize = AvroSerializer(stock, StockSchema(_text(row), "AVRO"))
    value = serialize({"body": "It smokes."}, place("tickets"))
    assert value is not None and value[0] == 0
    schema = Registry(url, **PATIENT).fetch(int.from_bytes(value[1:5], "big"))
    assert schema is not None and schema["fields"] == row["fields"]
    form = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
    schema_id = stock.register_schema("forms-value", StockSchema(_text(form), "JSON"))
    assert Registry(url, **PATIENT).fetch(schema_id) is None


def test_registry_applies_compatibility_rule_to_stock_clients(
    url: str, stock: SchemaRegistryClient
) -> None:
    register_all(url, prefix="ruled.", **PATIENT)
    narrow = {"type": "record", "name": "Usage", "namespace": "trivium", "fields": []}
    broken = {**narrow, "fields": [{"name": "no_default", "type": "string"}]}
    with pytest.raises(SchemaRegistryError):
        stock.register_schema("ruled.usage-value", StockSchema(_text(broken), "AVRO"))


def test_codec_reads_record_of_older_schema(url: str, stock: SchemaRegistryClient) -> None:
    current = full_schema("Usage")
    older = {**current, "fields": current["fields"][:-1]}
    old_id = Registry(url, **PATIENT).register("old.usage-value", older)
    usage = example("trivium.Usage")
    codec = make_codec(log(url, "old."))
    plain = {name: value for name, value in to_dict(usage).items() if name != _last(current)}
    serialize = AvroSerializer(stock, StockSchema(_text(older), "AVRO"))
    value = serialize(plain, place("old.usage"))
    assert value is not None and int.from_bytes(value[1:5], "big") == old_id
    default = current["fields"][-1]["default"]
    assert codec.decode(value) == replace(usage, **{_last(current): default})
    assert Codec().decode(Codec().encode(usage)) == usage


def test_schemas_command_works_against_registry(url: str) -> None:
    env = {"TRIVIUM_LOG_TOPIC_PREFIX": "cli.", "TRIVIUM_LOG_REQUEST_TIMEOUT_MS": "60000"}
    for command in (("register",), ("list", "--check"), ("list",)):
        code, output, errors = trivium_here("schemas", *command, "--url", url, env=env)
        assert (code, errors) == (0, "") and output
    assert "cli.prompts-value" in output


def _last(schema: Any) -> str:
    return str(schema["fields"][-1]["name"])


def _text(schema: Any) -> str:

    return json.dumps(schema)

"""Prompts by stock serializers and answers by stock deserializers, through a real registry: who
writes has a schema of its own or Trivium's, in Avro or as JSON Schema."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema as StockSchema
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from infra.platform.registry.node import running_apicurio
from schemas.codec import to_dict
from schemas.errors import ConfigError, RecordError
from schemas.settings import LogSettings
from streams.bridge.answers import AnswerBuilder
from streams.log.registry import make_codec
from tests.streams.bridge.samples import KEY, body_of, pair, question_of, record, stream

PROMPTS = SerializationContext("rows", MessageField.VALUE)
ANSWERS = SerializationContext("rows.answers", MessageField.VALUE)
FIELDS = [{"name": "text", "type": "string"}, {"name": "max_tokens", "type": ["null", "int"]}]
ASK = {"type": "record", "name": "Ask", "namespace": "com.shop", "fields": FIELDS}
FORM = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Ask",
    "type": "object",
    "properties": {"text": {"type": "string"}},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    try:
        with running_apicurio() as registry_url:
            yield registry_url
    except ConfigError as error:  # no Java, or it is not installed: the message says which
        pytest.skip(str(error))


@pytest.fixture
def stock(url: str) -> Iterator[SchemaRegistryClient]:
    with closing(SchemaRegistryClient({"url": url})) as client:
        yield client


def content_of(question: Any) -> str:
    return str(body_of(question)["messages"][-1]["content"])


async def test_bridge_reads_avro_prompt_with_producer_schema(
    url: str, stock: SchemaRegistryClient
) -> None:
    serialize = AvroSerializer(stock, StockSchema(json.dumps(ASK), "AVRO"))
    value = serialize({"text": "hi", "max_tokens": None}, PROMPTS)
    assert content_of(await question_of(value, url=url)) == "hi"
    question = await question_of(value, pair(template="Say {text}"), url)
    assert content_of(question) == "Say hi"


async def test_bridge_reads_avro_prompt_with_trivium_schema(
    url: str, stock: SchemaRegistryClient
) -> None:
    make_codec(LogSettings(schema_registry=url, request_timeout_ms=60_000))
    schema = stock.get_latest_version("prompts-value").schema
    conf = {"auto.register.schemas": False, "use.latest.version": True}
    serialize = AvroSerializer(stock, schema, conf=conf)
    place = SerializationContext("prompts", MessageField.VALUE)
    value = serialize({"text": "hi", "metadata": '{"id": 7}'}, place)
    question = await question_of(value, url=url)
    assert (content_of(question), question.metadata) == ("hi", '{"id":7}')


async def test_bridge_reads_json_schema_prompt(url: str, stock: SchemaRegistryClient) -> None:
    place = SerializationContext("forms", MessageField.VALUE)  # a subject has one kind of schema
    value = JSONSerializer(json.dumps(FORM), stock)({"text": "hi"}, place)
    assert value is not None and value[0] == 0
    assert content_of(await question_of(value, url=url)) == "hi"


async def test_bridge_rejects_unknown_schema_id(url: str) -> None:
    with pytest.raises(RecordError, match="schema id 1000000: the schema registry at"):
        await question_of(b"\x00" + (1_000_000).to_bytes(4, "big") + b"x", url=url)


async def test_stock_deserializer_reads_answer(url: str, stock: SchemaRegistryClient) -> None:
    codec = make_codec(LogSettings(schema_registry=url, request_timeout_ms=60_000))
    question = await question_of({"text": "hi"})
    when = {"asked_ms": 1, "first_token_ms": 2, "ended_ms": 3, "tries": 1}
    answers, prompt = AnswerBuilder(pair(format="avro"), codec), record({"text": "hi"})
    answer = await answers.answer(prompt, question, KEY, stream("Hello"), **when)
    read = AvroDeserializer(stock)(answers.sending(prompt, answer).value, ANSWERS)
    assert read == to_dict(answer)

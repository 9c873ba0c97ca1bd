"""Debezium's rows in Avro, by schemas that Connect's converter registers, are documents and prompts
as rows in JSON are."""

import asyncio
import json
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from infra.handbook.library import TextDocument
from infra.platform.connect.connectors import Database, avro, source
from infra.platform.connect.worker import Connect
from infra.platform.postgres import DATABASE, Postgres
from infra.platform.registry.node import running_apicurio
from infra.platform.tables import (
    DOCUMENTS_PUBLICATION,
    QUESTIONS_PUBLICATION,
    SOURCE_ROLE,
    DemoTables,
)
from schemas.settings import LogSettings
from streams.bridge.config import DocumentSource
from streams.bridge.documents.rows import change_of
from streams.bridge.records.record import PromptRecord
from streams.bridge.records.writer_schemas import WriterSchemas
from tests.streams.bridge.samples import body_of, pair, question_of

pytestmark = [pytest.mark.platform, pytest.mark.kafka]


async def records_of(kafka: LogSettings, topic: str, count: int) -> list[PromptRecord]:
    """The topic's first `count` records."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        async with asyncio.timeout(240):
            messages = [await consumer.getone() for _ in range(count)]
    finally:
        await consumer.stop()
    return [
        PromptRecord(
            topic=topic,
            partition=0,
            offset=message.offset,
            timestamp_ms=message.timestamp,
            key=message.key,
            value=message.value,
            headers=message.headers,
        )
        for message in messages
    ]


async def test_debezium_avro_rows_become_documents_and_prompts(
    kafka: LogSettings, tmp_path: Path
) -> None:
    """Rows are inserted, edited and deleted; keys are in Avro, too."""
    prefix = f"{kafka.topic_prefix}rows"
    with running_apicurio() as registry:
        async with Postgres() as database, Connect(kafka.bootstrap, tmp_path / "c") as connect:
            tables = DemoTables(database)
            await tables.create()
            reader = Database(
                host=database.host, port=database.port, name=DATABASE, user=SOURCE_ROLE
            )
            publications = {"documents": DOCUMENTS_PUBLICATION, "questions": QUESTIONS_PUBLICATION}
            for table, publication in publications.items():
                connector = source(
                    *(reader, table), publication=publication, slot=table, partitions=1,
                    prefix=prefix,
                )  # fmt: skip
                own_api = registry.replace("/apis/ccompat/v7", "/apis/registry/v2")
                await connect.run(table, avro(connector, own_api))
            await tables.insert([TextDocument("a", "The ferry leaves from pier 7.", "Ferries")])
            await tables.edit(TextDocument("a", "It leaves from pier 9."))
            await tables.delete("a")
            await tables.ask(["From where does it leave?"])
            rows = await records_of(kafka, f"{prefix}.documents", 3)
            (question,) = await records_of(kafka, f"{prefix}.questions", 1)
        ferries = DocumentSource(
            topic=rows[0].topic, collection="h", text="{body}", metadata=("title",)
        )
        schemas = WriterSchemas(registry, 60_000)
        changes = [await change_of(row, ferries, schemas) for row in rows]
        prompt = await question_of(
            question.value, pair(template="{question}"), registry, headers=question.headers
        )
    assert {change.key for change in changes} == {"h/a"}
    assert rows[0].is_avro and rows[2].value is None
    first, edited, deleted_document = (change.document for change in changes)
    assert first is not None and edited is not None and deleted_document is None
    assert first.text == "The ferry leaves from pier 7."
    assert json.loads(first.metadata) == {"title": "Ferries"}
    assert edited.text == "It leaves from pier 9."
    assert body_of(prompt)["messages"][0]["content"] == "From where does it leave?"

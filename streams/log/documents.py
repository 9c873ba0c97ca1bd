"""Writes documents and collection records to their topics; names the embedding workers' group."""

from schemas.records import CollectionDeclared, Document
from schemas.settings import LogSettings
from schemas.topics import declaration_key, document_key, partition_of
from streams.log.clients import Ack, LogProducer

KEPT = ("x-vectors", b"kept")  # header of passages whose vectors have not changed


def embedding_group(log: LogSettings) -> str:
    """Return the consumer group of all embedding workers."""
    return f"{log.topic_prefix}embedding"


async def declare(
    producer: LogProducer, log: LogSettings, collection: str, declaration: CollectionDeclared | None
) -> None:
    """Write a record about a collection, or its tombstone. Raise BrokerUnavailable."""
    key = declaration_key(collection)
    if declaration is not None:
        ack = await producer.send("documents", declaration, key=key, partition=0)
    else:
        topic = log.topic_prefix + "documents"
        ack = await producer.send_raw(topic, None, key=key.encode(), partition=0)
    await ack


async def send_document(producer: LogProducer, log: LogSettings, document: Document) -> Ack:
    """Send a document as `LogProducer.send` does. Raise RecordTooLarge, BrokerUnavailable."""
    key = document_key(document.collection, document.document_id)
    partition = partition_of(key, log.document_partitions)
    return await producer.send("documents", document, key=key, partition=partition)

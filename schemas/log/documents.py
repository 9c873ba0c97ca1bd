"""Documents on their topic: under their key, on their partition."""

from schemas.log.clients import Ack, LogProducer
from schemas.records import Document
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of


async def send_document(producer: LogProducer, log: LogSettings, document: Document) -> Ack:
    """As `LogProducer.send`; raises RecordTooLarge, BrokerUnavailable."""
    key = document_key(document.collection, document.document_id)
    partition = partition_of(key, log.document_partitions)
    return await producer.send("documents", document, key=key, partition=partition)

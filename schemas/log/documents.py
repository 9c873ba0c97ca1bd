"""Documents on their topic, under their key, on their partition; and who makes passages of them."""

from schemas.log.clients import Ack, LogProducer
from schemas.records import Document
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of

KEPT = ("x-vectors", b"kept")  # header of passages that were there, of which only facts changed


def embedding_group(log: LogSettings) -> str:
    """The consumer group of all embedding workers."""
    return f"{log.topic_prefix}embedding"


async def send_document(producer: LogProducer, log: LogSettings, document: Document) -> Ack:
    """As `LogProducer.send`; raises RecordTooLarge, BrokerUnavailable."""
    key = document_key(document.collection, document.document_id)
    partition = partition_of(key, log.document_partitions)
    return await producer.send("documents", document, key=key, partition=partition)

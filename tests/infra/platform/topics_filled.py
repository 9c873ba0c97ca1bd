"""One record of each kind on each topic of the table, for stock clients to read."""

from aiokafka import AIOKafkaProducer

from schemas.codec import Codec, full_schema
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from tests.schemas.examples import example

KEY = "ключ-1".encode()
ANSWER = b'{"prompt_topic": "prompts", "prompt_partition": 0, "prompt_offset": 7, "text": "Si"}'


async def fill(log: LogSettings) -> dict[str, list[bytes]]:
    """The values by full name of their topic; `answers` has one more, of JSON."""
    codec = Codec()
    values = {
        log.topic_prefix + topic.name: [
            codec.encode(example(full_schema(name))) for name in topic.records
        ]
        for topic in TOPICS.values()
    }
    values[f"{log.topic_prefix}answers"].append(ANSWER)
    producer = AIOKafkaProducer(bootstrap_servers=log.bootstrap)
    await producer.start()
    try:
        for topic, several in values.items():
            for value in several:
                headers = [("ce_type", b"x")]
                await producer.send_and_wait(topic, value, KEY, partition=0, headers=headers)
    finally:
        await producer.stop()
    return values

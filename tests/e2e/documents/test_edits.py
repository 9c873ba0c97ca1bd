"""A conversation over documents that are edited and deleted meanwhile, on a whole stack."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.handbook.library import Library, TextDocument, library
from schemas.codec import Codec
from schemas.records import Quoted, Work
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.registry import make_codec
from tests.e2e.harness import Client, sim_settings, stack
from tests.waits import PATIENCE_S, until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

TOWN = "town"
_SEARCHES = "trivium_retrieval_searches_total"
FERRY = TextDocument("ferry", "The ferry to Ondry leaves pier seven at noon.")
LIGHT = TextDocument("light", "The lighthouse of Ondry is lit by Marta at dusk.")
EDITED = TextDocument("ferry", "No boat has left the town since the storm.")


async def works(log: LogSettings) -> AsyncIterator[Work]:
    codec = make_codec(log)
    reader = AssignedReader(log, "decode", range(log.worker_partitions), client_id="works")
    async with reader.reading("earliest"):
        async for record in reader.by_time(await reader.end_offsets()):
            work = codec.decode(record.value)
            if isinstance(work, Work):
                yield work


class Conversation:
    """Turns over one collection."""

    def __init__(self, client: Client, log: LogSettings) -> None:
        self._client, self._log = client, log
        self._messages: list[dict[str, Any]] = []

    async def ask(self, question: str) -> bytes:
        """The prompt of one more turn, as its worker got it."""
        self._messages.append({"role": "user", "content": question})
        retrieval = {"collection": TOWN, "k": 1}
        answer = await self._client.chat("", messages=self._messages, retrieval=retrieval)
        assert not answer.error, answer.error
        self._messages.append({"role": "assistant", "content": answer.text})
        request_id = answer.headers["x-request-id"]
        (prompt,) = {w.prompt_tokens async for w in works(self._log) if w.request_id == request_id}
        return prompt


async def delete(log: LogSettings, document_id: str) -> None:
    key = document_key(TOWN, document_id)
    topic, partition = log.topic_prefix + "documents", partition_of(key, log.document_partitions)
    async with LogProducer(log, Codec(), durable=True, client_id="deletes") as producer:
        await (await producer.send_raw(topic, None, key=key.encode(), partition=partition))


async def tokens_of(shelf: Library, document_id: str) -> tuple[bytes, Quoted]:
    """The only passage of a document, and how it is quoted."""
    (passage,) = [p for p in await shelf.passages(TOWN) if p.document_id == document_id]
    (chunk,) = passage.chunks
    return chunk.tokens, Quoted(document_id=document_id, content=passage.content_hash)


async def test_conversation_drops_edited_or_deleted_passages(
    kafka: LogSettings, tmp_path: Path
) -> None:
    """Passages of earlier turns stay exactly as long as their documents are unchanged."""
    settings = sim_settings(kafka, gateway={"ttft_ms": 120_000})
    log = settings.log
    async with (
        stack(settings, tmp_path / "home", replica=1, retrieval=1, embedding=1) as running,
        library(log) as shelf,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        await shelf.put(TOWN, [FERRY, LIGHT])
        for document in (FERRY, LIGHT):
            await shelf.wait_for(TOWN, document, PATIENCE_S)
        (ferry, _), (light, quoted) = [await tokens_of(shelf, d) for d in ("ferry", "light")]
        talk = Conversation(client, log)
        first = await talk.ask("When does the ferry to Ondry leave pier seven?")
        second = await talk.ask("Who lit the lighthouse of Ondry at dusk?")
        assert ferry in first and light not in first
        assert ferry in second and light in second and second.startswith(first)

        await shelf.put(TOWN, [EDITED])
        await shelf.wait_for(TOWN, EDITED, PATIENCE_S)
        third = await talk.ask("And who lit the lighthouse of Ondry before Marta?")
        assert ferry not in third and light in third

        await delete(log, "light")

        async def is_stale() -> bool:
            by_ms = wall_ms() + 10_000
            return bool(await shelf.client.check([quoted], collection=TOWN, deadline_ms=by_ms))

        await until(is_stale)
        fourth = await talk.ask("When does a boat leave the town since the storm?")
        assert ferry not in fourth and light not in fourth
        assert (await tokens_of(shelf, "ferry"))[0] in fourth
        await until(lambda: is_scraped(running.gateway_urls[0]))


async def is_scraped(url: str) -> bool:
    """Whether the metrics show the searches that the retrieval worker's heartbeats count."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        lines = (await http.get(f"{url}/metrics")).text.splitlines()
    counter_lines = [line for line in lines if line.startswith(_SEARCHES) and "completed" in line]
    counts = [float(line.split()[-1]) for line in counter_lines]
    rows = [line for line in lines if line.startswith("trivium_retrieval_rows{") and TOWN in line]
    return bool(rows) and sum(counts) >= 4  # one for each turn

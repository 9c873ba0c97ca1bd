"""Rows on a topic are found, edited and gone, over a bridge of a whole stack."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infra.handbook.library import Library, TextDocument, library
from schemas.codec import Codec
from schemas.settings import LogSettings
from streams.bridge.config import BridgeSettings, DocumentSource
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from tests.e2e.harness import sim_settings, stack
from tests.waits import PATIENCE_S, until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]
TOWN = "town"
FERRY = TextDocument("ferry", "The ferry to Ondry leaves pier seven at noon.")
EDITED = TextDocument("ferry", "No boat has left the town since the storm.")
LIGHT = TextDocument("light", "The lighthouse of Ondry is lit by Marta at dusk.")


async def commit(log: LogSettings, name: str, text: TextDocument | None) -> None:
    """As a change stream says it."""
    value = None if text is None else json.dumps({"id": name, "body": text.text}).encode()
    async with LogProducer(log, Codec(), durable=True, client_id="database") as producer:
        key = json.dumps({"id": name}).encode()
        await (await producer.send_raw(f"{log.topic_prefix}rows", value, key=key, partition=0))


async def search_document_ids(shelf: Library, text: str) -> list[str]:
    answer = await shelf.client.search_text(
        text, collection=TOWN, k=5, deadline_ms=wall_ms() + 30_000
    )
    return [passage.document_id for passage in answer.passages]


async def test_bridge_indexes_edits_and_deletes_rows(kafka: LogSettings, tmp_path: Path) -> None:
    source = DocumentSource(topic=f"{kafka.topic_prefix}rows", collection=TOWN, text="{body}")
    settings = replace(sim_settings(kafka), bridge=BridgeSettings(documents=(source,)))
    async with (
        stack(settings, tmp_path / "home", replica=1, retrieval=1, embedding=1, bridges=1),
        library(kafka) as shelf,
    ):
        for text in (FERRY, LIGHT):
            await commit(kafka, text.document_id, text)
        for text in (FERRY, LIGHT):
            await shelf.wait_for(TOWN, text, PATIENCE_S)
        await commit(kafka, "ferry", EDITED)
        await shelf.wait_for(TOWN, EDITED, PATIENCE_S)
        await commit(kafka, "ferry", None)

        async def is_gone() -> bool:
            return "ferry" not in await search_document_ids(shelf, EDITED.text)

        await until(is_gone)
        assert await search_document_ids(shelf, LIGHT.text) == ["light"]

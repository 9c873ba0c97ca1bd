"""The retrieval pool as a gateway's client: vectors of texts, searches, and cached answers.

The gateway joins the pool as a separate member, with the first call that needs it. So a gateway
without a retrieval pool leases no partition of `hits`, and one that loses this lease still serves
chats.
"""

import asyncio
import logging
from collections.abc import Awaitable, Collection, Sequence
from typing import Any, Protocol

from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, NotReady, UnknownModel
from schemas.records import Document, Quoted
from schemas.settings import LogSettings
from schemas.topics import document_key, partition_of
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import Ack
from streams.log.clock import wall_ms
from streams.log.documents import send_document
from streams.log.retrieval.client import RetrievalClient, open_retrieval_client
from streams.log.retrieval.embedding import EmbeddedTexts, Texts
from streams.log.retrieval.results import RetrievalResult
from streams.log.retry import TRANSIENT_ERRORS

logger = logging.getLogger(__name__)


class RetrievalPool(Protocol):
    """The retrieval pool: it embeds texts, and stores and searches documents."""

    async def embed(
        self, texts: Texts, *, deadline_ms: int, tenant: str = "", embedder: str = ""
    ) -> EmbeddedTexts:
        """Embed all texts or none, by a model that is named with or without its version; by the
        deployment's first if none is named.

        Raises UnknownModel, NotReady, DeadlineExceeded, BrokerUnavailable and InvalidRequest.
        """

    async def search_text(self, text: str, *, deadline_ms: int, **fields: Any) -> RetrievalResult:
        """Search by text, as `RetrievalClient.search_text` does."""

    async def check(
        self, quoted: Sequence[Quoted], *, deadline_ms: int, **fields: Any
    ) -> frozenset[str]:
        """Check quoted documents, as `RetrievalClient.check` does."""

    async def write(self, document: Document) -> None:
        """Write a document and wait for the broker; raises RecordTooLarge, BrokerUnavailable."""

    async def remove(self, collection: str, document_id: str) -> None:
        """Delete a document and wait for the broker; raises BrokerUnavailable."""


class LogPool:
    """The retrieval pool behind the log; call `close` at the end."""

    def __init__(
        self,
        log: LogSettings,
        codec: Codec,
        member_id: str,
        join_ms: int,
        embedders: Collection[str] = (),
    ) -> None:
        """Set up a client; `embedders` are names of models that the settings have, without
        versions: calls to one of them wait for its workers."""
        self._log, self._codec, self._embedders = log, codec, embedders
        self._member_id = member_id
        self._join_ms = join_ms
        self._joined: asyncio.Future[RetrievalClient] | None = None
        self._member_task: asyncio.Task[None] | None = None

    async def embed(
        self, texts: Texts, *, deadline_ms: int, tenant: str = "", embedder: str = ""
    ) -> EmbeddedTexts:
        client = await self._client(deadline_ms)
        try:
            return await client.embed(
                texts, deadline_ms=deadline_ms, tenant=tenant, embedder=embedder
            )
        except UnknownModel:
            if embedder not in self._embedders:
                raise
            raise NotReady(f"no embedding worker of {embedder} is ready; try again later") from None

    async def search_text(self, text: str, *, deadline_ms: int, **fields: Any) -> RetrievalResult:
        client = await self._client(deadline_ms)
        return await client.search_text(text, deadline_ms=deadline_ms, **fields)

    async def check(
        self, quoted: Sequence[Quoted], *, deadline_ms: int, **fields: Any
    ) -> frozenset[str]:
        client = await self._client(deadline_ms)
        return await client.check(quoted, deadline_ms=deadline_ms, **fields)

    async def write(self, document: Document) -> None:
        client = await self._client()
        await self._await_ack(send_document(client.producer, self._log, document))

    async def remove(self, collection: str, document_id: str) -> None:
        client = await self._client()
        key = document_key(collection, document_id)
        partition = partition_of(key, self._log.document_partitions)
        topic = self._log.topic_prefix + "documents"
        sending = client.producer.send_raw(topic, None, key=key.encode(), partition=partition)
        await self._await_ack(sending)

    async def _await_ack(self, sending: Awaitable[Ack]) -> None:
        try:
            async with asyncio.timeout(self._join_ms / 1000):
                await (await sending)
        except (TimeoutError, KafkaError) as error:
            raise BrokerUnavailable(
                f"a document was not written: {type(error).__name__}: {error}"
            ) from error

    async def _client(self, deadline_ms: int | None = None) -> RetrievalClient:
        """Return the client of the present membership, or join, by the deadline at the latest."""
        until_ms = wall_ms() + self._join_ms
        until_ms = until_ms if deadline_ms is None else min(until_ms, deadline_ms)
        if self._member_task is None or self._member_task.done():
            self._joined = asyncio.get_running_loop().create_future()
            self._member_task = asyncio.create_task(self._stay_member(self._joined))
        assert self._joined is not None
        try:
            async with asyncio.timeout(max(0, until_ms - wall_ms()) / 1000):
                return await asyncio.shield(self._joined)
        except TimeoutError:
            raise BrokerUnavailable("the retrieval pool was not joined in time") from None

    async def _stay_member(self, joined: "asyncio.Future[RetrievalClient]") -> None:
        """Stay a member until the membership is lost; the next call joins again."""
        try:
            async with open_retrieval_client(self._log, self._codec, self._member_id) as client:
                joined.set_result(client)
                await asyncio.Event().wait()
        except TRANSIENT_ERRORS as error:
            logger.warning("%s: %s: %s", self._member_id, type(error).__name__, error)
            if not joined.done():
                joined.set_exception(
                    BrokerUnavailable(f"the retrieval pool was not joined: {error}")
                )
        finally:
            joined.cancel()

    async def close(self) -> None:
        """Leave the retrieval pool and end the membership."""
        if self._member_task is not None:
            await cancel_and_wait(self._member_task)

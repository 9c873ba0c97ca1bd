"""The client of the retrieval pool: sends a retrieval to all shards and merges their answers.

A client is a member of the fleet that leases a partition of `hits`. `exchange.py` decides where a
retrieval is sent, and when it is sent again; `embedding.py` requests vectors only.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, InvalidRequest, RecordError
from schemas.records import Embedded, Hits, MemberKind, MemberState, Quoted, RetrievalRequest
from schemas.retrieval import CHECK, MODES, WORDS, check_hits, pack_vector
from schemas.rules.embedders import public_name
from schemas.rules.sizes import QUOTED_MAX, SEEDS_MAX
from schemas.settings import LogSettings
from schemas.topics import check_record
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import AssignedReader, LogProducer, send_dead_letter
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from streams.log.retrieval.embedding import EmbeddedTexts, EmbeddingClient, Texts
from streams.log.retrieval.exchange import RetrievalExchange, by_words
from streams.log.retrieval.results import (
    RetrievalResult,
    embedder_of,
    embedders,
    embedding_workers,
)
from streams.log.retrieval.routes import PoolRoutes, Route
from streams.log.retry import TRANSIENT_ERRORS
from streams.log.slices import in_slices


class RetrievalClient:
    """Searches: `start`, then `run` until cancelled, with any number of searches; then `stop`."""

    def __init__(
        self, settings: LogSettings, codec: Codec, producer: LogProducer, membership: Membership
    ) -> None:
        """Create a client; `membership` must have joined with a lease on `hits`, and be running."""
        self._codec = codec
        self.producer = producer
        self.membership = membership
        self._partition = membership.leases["hits"]
        self._reader = AssignedReader(
            settings, "hits", [self._partition], client_id=f"{membership.member_id}-hits"
        )
        direct = Route(settings.retrieval_partitions)
        by_pool = PoolRoutes(settings.retrieval_partitions)
        self._exchange = RetrievalExchange(producer, membership, direct, by_pool, settings.place)
        self._embedding = EmbeddingClient(producer, membership, by_pool)

    async def start(self) -> None:
        """Start the reader; no hits are missed from now on."""
        await self._reader.start("latest")

    async def stop(self) -> None:
        """Stop reading and close the reader."""
        await self._reader.stop()

    async def run(self) -> None:
        """Pass hits to the searches that wait for them, until cancelled."""
        while True:
            async for record in in_slices(await self._reader.batch()):
                try:
                    answer = self._codec.decode(record.value)
                    check_record("hits", answer)
                    self._take(answer)
                except RecordError as error:
                    await send_dead_letter(self.producer, record, error)

    def _take(self, answer: Hits | Embedded) -> None:
        if isinstance(answer, Embedded):
            self._embedding.take(answer)
        else:
            check_hits(answer)
            self._exchange.take(answer)

    async def search(
        self,
        vector: Any,
        *,
        collection: str,
        k: int = 10,
        deadline_ms: int,
        kind: Literal["prefill", "decode"] = "decode",
        filter: str = "",
        top_m: int = 0,
        width: int = 0,
        patience: int = 0,
        seeds: Sequence[str] = (),
        wants_seeds: bool = False,
        wants_passages: bool = False,
        tenant: str = "",
        request_id: str = "",
    ) -> RetrievalResult:
        """Return the k nearest documents of all shards, by the deadline (wall time).

        `missing` has the shards that did not answer. Raises NotReady if no retrieval worker is
        ready, DeadlineExceeded if no shard answered, QueueFull, BrokerUnavailable, and the error
        with which the shards refused the retrieval.
        """
        fields = {"top_m": top_m, "width": width, "patience": patience, "tenant": tenant}
        request = self._request(
            collection, k, deadline_ms, kind, vector=pack_vector(vector), filter=filter,
            seeds=tuple(seeds), wants_seeds=wants_seeds, wants_passages=wants_passages,
            request_id=request_id, **fields,
        )  # fmt: skip
        return await self._ask(request)

    async def search_text(
        self,
        text: str,
        *,
        collection: str,
        k: int = 5,
        deadline_ms: int,
        kind: Literal["prefill", "decode"] = "prefill",
        mode: Literal["hybrid", "vector", "words"] = "hybrid",
        filter: str = "",
        min_score: float = -1.0,
        tenant: str = "",
        seeds: Sequence[str] = (),
        wants_seeds: bool = False,
        wants_passages: bool = True,
        request_id: str = "",
        quoted: Sequence[Quoted] = (),
    ) -> RetrievalResult:
        """Return the k best passages of all shards for a text, by its vector, its words, or both
        fused.

        `RetrievalResult.passages` has their texts. Passages below `min_score` (a cosine) are left
        out. If the text got no vector, `RetrievalResult.degraded` says why, and the search is by
        words only. `RetrievalResult.changed` has the `quoted` documents that must not be quoted any
        more, as `check` returns them. Raises the errors of `search`, and InvalidRequest.
        """
        if mode not in MODES:
            raise InvalidRequest(f"expected {', '.join(MODES)}, found {mode!r:.80}", "mode")
        if not text.strip():
            raise InvalidRequest("expected a text to search for, found none", "text")
        request = self._request(
            collection, k, deadline_ms, kind, vector=b"", text=text, mode=mode, filter=filter,
            min_score=min_score, tenant=tenant, seeds=tuple(seeds), wants_seeds=wants_seeds,
            wants_passages=wants_passages, request_id=request_id, quoted=tuple(quoted),
        )  # fmt: skip
        if mode == WORDS:
            return await self._ask(request)
        view = self.membership.view
        pools = embedders(view).keys() - {""}
        if pools and (embedder := embedder_of(view, collection, pools)):
            request = replace(request, embedder=embedder)
        if not embedding_workers(view, wall_ms(), public_name(request.embedder)):
            result = await self._ask(by_words(request))
            which = f" of {request.embedder}" if request.embedder else ""
            return replace(result, degraded=f"no embedding worker{which} is ready")
        result = await self._ask(request)
        if result.mode != WORDS:
            return result
        return replace(result, degraded="the embedding pool made no vector in time")

    async def check(
        self,
        quoted: Sequence[Quoted],
        *,
        collection: str,
        tenant: str = "",
        deadline_ms: int,
        kind: Literal["prefill", "decode"] = "prefill",
        request_id: str = "",
    ) -> frozenset[str]:
        """Return the ids of those documents that are deleted, changed, or not for this tenant.

        Documents of shards that do not answer are included. Raises the errors of `search`.
        """
        if not quoted:
            return frozenset()
        request = self._request(
            collection, 1, deadline_ms, kind, vector=b"", mode=CHECK, tenant=tenant,
            quoted=tuple(quoted), request_id=request_id,
        )  # fmt: skip
        return (await self._ask(request)).changed

    async def embed(
        self, texts: Texts, *, deadline_ms: int, tenant: str = "", embedder: str = ""
    ) -> EmbeddedTexts:
        """Return the vectors of texts, in their order, all or none, by a model that is named with
        or without its version; by the deployment's first if none is named.

        Raises UnknownModel, NotReady if no worker of the model is ready, DeadlineExceeded,
        BrokerUnavailable, and the error with which the pool refused the texts.
        """
        self._check_valid()
        return await self._embedding.embed(texts, deadline_ms, tenant, embedder)

    def _request(
        self, collection: str, k: int, deadline_ms: int, kind: str, **fields: Any
    ) -> RetrievalRequest:
        for name, limit in (("seeds", SEEDS_MAX), ("quoted", QUOTED_MAX)):
            if (count := len(fields.get(name, ()))) > limit:
                raise InvalidRequest(f"expected at most {limit} {name}, found {count}", name)
        return RetrievalRequest(
            retrieval_id=uuid.uuid4().hex,
            asker_id=self.membership.member_id,
            reply_partition=self._partition,
            collection=collection,
            k=k,
            urgency=kind,
            asked_ms=wall_ms(),
            deadline_ms=deadline_ms,
            **fields,
        )

    async def _ask(self, request: RetrievalRequest) -> RetrievalResult:
        self._check_valid()
        return await self._exchange.ask(request)

    def _check_valid(self) -> None:
        if not self.membership.is_valid():
            raise BrokerUnavailable("the log does not answer; hits would not arrive")


log = logging.getLogger("trivium.asker")
TRY_AGAIN_S = 5.0


class LeasedRetrievalClient:
    """Leases a partition and runs a client: `run` beside the membership until cancelled."""

    def __init__(
        self, make: Callable[[Membership], RetrievalClient], membership: Membership
    ) -> None:
        """Create it without a client; `make` creates one when the partition is leased."""
        self.client: RetrievalClient | None = None
        self._make, self._membership = make, membership

    async def run(self) -> None:
        """Lease a partition and pass hits to the searches that wait, until cancelled."""
        while True:
            try:
                await self._membership.lease("hits")
                await self._follow_hits()
            except Exception as error:  # no error may end the member
                log.warning(
                    "%s: goes on without searches: %s; tries again",
                    *(self._membership.member_id, error),
                    exc_info=not isinstance(error, TRANSIENT_ERRORS),
                )
            await asyncio.sleep(TRY_AGAIN_S)

    async def _follow_hits(self) -> None:
        client = self._make(self._membership)
        await client.start()
        try:
            self.client = client
            await client.run()
        finally:
            self.client = None
            await client.stop()


@asynccontextmanager
async def open_retrieval_client(
    settings: LogSettings, codec: Codec, member_id: str
) -> AsyncIterator[RetrievalClient]:
    """Join the fleet, and yield a client until the end of the context.

    If the membership ends first, no hits arrive any more: the context's body is cancelled, and the
    LeaseError or BrokerUnavailable that ended the membership is raised.
    """
    producer = LogProducer(settings, codec, durable=True, client_id=member_id)
    membership = Membership(
        settings,
        codec,
        producer,
        member_id=member_id,
        kind=MemberKind.ASKER,
        lease_topics=["hits"],
    )
    try:
        async with AsyncExitStack() as closing, asyncio.TaskGroup() as tasks:
            closing.push_async_callback(producer.stop)
            closing.push_async_callback(membership.leave)
            await producer.start()
            await membership.join()
            client = RetrievalClient(settings, codec, producer, membership)
            closing.push_async_callback(client.stop)
            await client.start()
            membership.set_state(MemberState.READY)
            lives = [tasks.create_task(membership.run()), tasks.create_task(client.run())]
            try:
                yield client
            finally:
                await cancel_and_wait(*lives)
    except ExceptionGroup as group:  # the membership's end, or an error of the body
        raise (error := group.exceptions[0]) from error.__cause__

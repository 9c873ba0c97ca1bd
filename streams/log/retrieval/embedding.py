"""Requests the vectors of texts from the embedding pool; `client.py` passes it the answers.

Many texts are sent in several records, on partitions in turn, so that all embedding workers have a
share. If a record's partition is silent, the record is sent once more, to the partition farthest
away.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from aiokafka.errors import KafkaError

from schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NotReady,
    QueueFull,
    RecordError,
    TriviumError,
    UnknownModel,
    from_wire,
)
from schemas.records import Embedded, EmbedRequest
from schemas.retrieval import Vector, unpack_vector
from schemas.rules.embedders import public_name
from schemas.rules.sizes import RETRIEVAL_BYTES_MAX, TEXTS_MAX
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from streams.log.retrieval.results import embedders, embedding_workers
from streams.log.retrieval.routes import EMBEDDING, PoolRoutes, Route

ASKED_MAX = 1_024  # records of a tenant in flight
_PART_TEXTS, _PART_BYTES = 64, RETRIEVAL_BYTES_MAX // 2  # of one record
_TOKEN_BYTES = 5  # largest size of an id in Avro
_AGAIN_AFTER = 0.4  # of the time to the deadline


Texts = Sequence[str] | Sequence[Sequence[int]]  # texts, or token ids of the embedder


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedTexts:
    """The vectors of texts, shape (texts, dim), and their model."""

    vectors: Vector
    embedder: str  # name and version
    tokens: int  # of all texts


class EmbeddingClient:
    """Embeds texts: any number of `embed` at once; `take` gets the answers."""

    def __init__(self, producer: LogProducer, membership: Membership, routes: PoolRoutes) -> None:
        self._producer, self._membership, self._routes = producer, membership, routes
        self._pending: dict[str, tuple[asyncio.Future[Embedded], Route, int, int]] = {}
        self._parts_of: Counter[str] = Counter()  # records in flight, by tenant

    def take(self, embedded: Embedded) -> None:
        """Take an answer. Raise RecordError if it is invalid."""
        pending = self._pending.get(embedded.embed_id)
        if pending is None:
            return
        answer, route, partition, count = pending
        route.note_answer(partition, EMBEDDING, wall_ms())
        if embedded.error is None:
            values = unpack_vector(embedded.vectors)
            if (
                embedded.dim < 1
                or len(values) != count * embedded.dim
                or not np.isfinite(values).all()
            ):
                raise RecordError(
                    f"embedded: expected {count} vectors of {embedded.dim} finite values, found "
                    f"{values!r:.200}"
                )
        if not answer.done():
            answer.set_result(embedded)

    async def embed(
        self, texts: Texts, deadline_ms: int, tenant: str = "", embedder: str = ""
    ) -> EmbeddedTexts:
        """Return the vectors of texts, in their order, all or none; `embedder` is the name of a
        model, or empty."""
        if not 0 < len(texts) <= TEXTS_MAX:
            raise InvalidRequest(f"expected 1 to {TEXTS_MAX} texts, found {len(texts)}", "input")
        pool = self._pool_of(embedder)
        try:
            async with asyncio.timeout(max(0, deadline_ms - wall_ms()) / 1000):
                return _concatenate(await self._embed_parts(texts, deadline_ms, tenant, pool))
        except TimeoutError as error:
            raise DeadlineExceeded("the texts were not embedded before the deadline") from error

    def _pool_of(self, embedder: str) -> str:
        """Return the pool of a model; raises UnknownModel, and NotReady if none of its workers is
        ready, or no embedding worker is known at all."""
        view = self._membership.view
        models = embedders(view)
        pool = next(
            (
                pool
                for pool, capability in models.items()
                if embedder in (capability.embedder, public_name(capability.embedder))
            ),
            None if embedder and models else "",
        )
        if pool is None:
            names = sorted(public_name(capability.embedder) for capability in models.values())
            raise UnknownModel(f"model: expected {_one_of(names)}, found {embedder[:80]!r}")
        if not embedding_workers(view, wall_ms(), pool):
            which = f" of {pool}" if pool else ""
            raise NotReady(
                f"no embedding worker{which} is ready; start one with `trivium run embedding`"
            )
        return pool

    async def _embed_parts(
        self, texts: Texts, deadline_ms: int, tenant: str, pool: str
    ) -> list[Embedded]:
        try:
            async with asyncio.TaskGroup() as group:
                parts = [
                    self._embed_part(part, deadline_ms, tenant, pool) for part in _parts(texts)
                ]
                asking = [group.create_task(part) for part in parts]
        except* TriviumError as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in asking]

    async def _embed_part(self, texts: Texts, deadline_ms: int, tenant: str, pool: str) -> Embedded:
        if self._parts_of[tenant] >= ASKED_MAX:
            raise QueueFull(f"{ASKED_MAX} calls for embeddings are under way; ask less at once")
        self._parts_of[tenant] += 1
        try:
            return await self._request_part(texts, deadline_ms, tenant, pool)
        finally:
            self._parts_of[tenant] -= 1
            if not self._parts_of[tenant]:
                del self._parts_of[tenant]

    async def _request_part(
        self, texts: Texts, deadline_ms: int, tenant: str, pool: str
    ) -> Embedded:
        request = EmbedRequest(
            embed_id=uuid.uuid4().hex,
            asker_id=self._membership.member_id,
            reply_partition=self._membership.leases["hits"],
            texts=tuple(text for text in texts if isinstance(text, str)),
            token_ids=tuple(text for text in texts if not isinstance(text, str)),
            deadline_ms=deadline_ms,
            tenant=tenant,
            embedder=pool,
        )
        route = self._routes.of(pool)
        answer: asyncio.Future[Embedded] = asyncio.get_running_loop().create_future()
        began_ms, partition = wall_ms(), route.next(wall_ms())
        second_request = replace(request, embed_id=request.embed_id + "-2")
        try:
            await self._send(request, route, partition, answer)
            after_s = _AGAIN_AFTER * (deadline_ms - began_ms) / 1000
            await asyncio.wait([answer], timeout=after_s)
            if not answer.done() and route.is_silent(partition, [EMBEDDING], began_ms):
                route.avoid(partition, wall_ms())
                other_partition = route.farthest(partition, wall_ms())
                await self._send(second_request, route, other_partition, answer)
            return await answer
        finally:
            for attempt in (request, second_request):
                self._pending.pop(attempt.embed_id, None)

    async def _send(
        self,
        request: EmbedRequest,
        route: Route,
        partition: int,
        answer: asyncio.Future[Embedded],
    ) -> None:
        self._pending[request.embed_id] = (
            answer,
            route,
            partition,
            len(request.token_ids or request.texts),
        )
        key = request.embed_id
        try:
            await (await self._producer.send("embeddings", request, key=key, partition=partition))
        except KafkaError as error:
            raise BrokerUnavailable(f"the texts were not sent: {error}") from error


def _one_of(names: Sequence[str]) -> str:
    quoted_names = ", ".join(map(repr, names))
    return quoted_names if len(names) == 1 else f"one of {quoted_names}"


def _parts(texts: Texts) -> list[list[Any]]:
    """Divide texts into as few records as possible."""
    parts: list[list[Any]] = [[]]
    size = 0
    for text in texts:
        if isinstance(text, str):
            length = len(text.encode(errors="replace"))
        else:
            length = _TOKEN_BYTES * len(text)
        if length > _PART_BYTES:
            raise InvalidRequest(
                f"expected texts of at most {_PART_BYTES} bytes, found one of {length}", "input"
            )
        if parts[-1] and (len(parts[-1]) == _PART_TEXTS or size + length > _PART_BYTES):
            parts.append([])
            size = 0
        parts[-1].append(text)
        size += length
    return parts


def _concatenate(answers: Sequence[Embedded]) -> EmbeddedTexts:
    for answer in answers:
        if answer.error is not None:
            raise from_wire(answer.error)
    kinds = {(answer.embedder, answer.dim) for answer in answers}
    if len(kinds) > 1:
        raise EngineFailed(f"the texts were embedded by several models: {sorted(kinds)!r:.200}")
    ((embedder, dim),) = kinds
    vectors = np.concatenate([unpack_vector(answer.vectors).reshape(-1, dim) for answer in answers])
    return EmbeddedTexts(
        vectors=vectors, embedder=embedder, tokens=sum(answer.tokens for answer in answers)
    )

"""A pool that is a function, for an asker: producer, membership and reader in one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from schemas.codec import Codec
from schemas.fleet import FleetView
from schemas.records import (
    CollectionState,
    EmbedCapability,
    Embedded,
    EmbedRequest,
    Heartbeat,
    Hits,
    Load,
    MemberKind,
    MemberState,
    Registration,
    RetrievalRequest,
    Role,
    SearchCapability,
    SearchLoad,
)
from schemas.retrieval import pack_vector
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from streams.log.retrieval.client import RetrievalClient
from streams.log.retrieval.results import RetrievalResult

CODEC = Codec()
Answers = Callable[["Pool", int, Any], None]


def hits(request: RetrievalRequest, shard: int = 0, *, shards: int = 1, **fields: Any) -> Hits:
    distances_by_id: dict[str, float] = fields.pop("found", {"a": 1.0})
    return Hits(
        retrieval_id=request.retrieval_id,
        request_id="",
        worker_id="w",
        shard=shard,
        shards=shards,
        collection="c",
        document_ids=tuple(distances_by_id),
        distances=pack_vector(list(distances_by_id.values())),
        at_ms=0,
        **fields,
    )


class Pool:
    """Producer, membership and reader of an asker at once; `answers` is called for each record."""

    member_id = "asker"

    def __init__(self, shards: int, answers: Answers) -> None:
        self.leases = {"hits": 0}
        self.view = FleetView()
        self.valid = True
        self.asked_partitions: list[int] = []  # partitions, in order
        self.topics: list[str] = []
        self.ids: list[str] = []
        self.buried: list[bytes] = []
        self._answers = answers
        self._records: asyncio.Queue[Any] = asyncio.Queue()
        self.join(shards)

    def join(self, shards: int) -> None:
        """Register a ready worker for each of so many shards."""
        for shard in range(shards):
            self.register(f"w{shard}/{shards}", shard, shards)

    def register(self, name: str, shard: int, shards: int) -> None:
        """Register one ready worker of a shard."""
        now_ms = wall_ms()
        part = SearchCapability(shard=shard, shards=shards, backend="cpu", slots=8)
        joined = Registration(
            member_id=name, epoch=1, kind=MemberKind.WORKER, roles=(Role.RETRIEVAL,),
            started_ms=0, search=part,
        )  # fmt: skip
        self.view.apply(joined, shard, now_ms)
        beat = Heartbeat(
            member_id=name, epoch=1, seq=1, at_ms=0, state=MemberState.READY, load=Load()
        )
        self.view.apply(beat, shard, now_ms)

    def is_valid(self) -> bool:
        return self.valid

    def holds(self, name: str, **embedders: str) -> None:
        """Have a ready worker tell the embedding models of its collections."""
        states = [
            CollectionState(name=n, dim=2, metric="cosine", documents=1, embedder=by)
            for n, by in embedders.items()
        ]
        self.view.members[name].search = SearchLoad(collections=states)

    def embeds(self, *names: str, embedder: str = "hash@1", pool: str = "") -> None:
        """Register ready embedding workers by these names."""
        now_ms = wall_ms()
        for offset, name in enumerate(names):
            part = EmbedCapability(embedder=embedder, dim=2, tokens_max=64, pool=pool)
            joined = Registration(
                member_id=name, epoch=1, kind=MemberKind.WORKER, roles=(Role.EMBEDDING,),
                started_ms=0, embedding=part,
            )  # fmt: skip
            self.view.apply(joined, offset, now_ms)
            beat = Heartbeat(
                member_id=name, epoch=1, seq=1, at_ms=0, state=MemberState.READY, load=Load()
            )
            self.view.apply(beat, offset, now_ms)

    async def send(self, topic: str, record: Any, *, key: str, partition: int) -> Any:
        is_embed = isinstance(record, EmbedRequest)
        assert key == (record.embed_id if is_embed else record.retrieval_id)
        self.asked_partitions.append(partition)
        self.topics.append(topic)
        self.ids.append(key)
        ack = asyncio.get_running_loop().create_future()
        ack.set_result(None)
        self._answers(self, partition, record)
        return ack

    def answer(self, record: Hits | Embedded) -> None:
        self.say(CODEC.encode(record))

    def say(self, value: bytes) -> None:
        """Deliver a value, which is dead-lettered if it is no answer."""
        place: dict[str, Any] = {"partition": 0, "offset": 0, "timestamp": 0, "headers": ()}
        record = SimpleNamespace(topic="hits", key=b"k", value=value, **place)
        self._records.put_nowait(record)

    async def send_raw(self, full_topic: str, value: Any, **_: Any) -> Any:
        assert full_topic == "hits.dlq"
        self.buried.append(value)
        ack = asyncio.get_running_loop().create_future()
        ack.set_result(None)
        return ack

    async def batch(self) -> list[Any]:
        return [await self._records.get()]


@asynccontextmanager
async def asking(shards: int, answers: Answers) -> AsyncIterator[tuple[RetrievalClient, Pool]]:
    pool = Pool(shards, answers)
    settings = LogSettings(retrieval_partitions=4)
    client = RetrievalClient(settings, CODEC, pool, pool)  # type: ignore[arg-type]  # fakes
    client._reader = pool  # type: ignore[assignment]  # the same
    life = asyncio.create_task(client.run())
    try:
        yield client, pool
    finally:
        life.cancel()


async def ask_text(
    asker: RetrievalClient, within_ms: int = 1_000, **fields: Any
) -> RetrievalResult:
    fields = {"collection": "c", "k": 2, **fields}
    return await asker.search_text("when?", deadline_ms=wall_ms() + within_ms, **fields)


async def ask(asker: RetrievalClient, within_ms: int = 300) -> RetrievalResult:
    return await asker.search([1.0], collection="c", deadline_ms=wall_ms() + within_ms)

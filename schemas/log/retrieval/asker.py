"""Asks the retrieval pool: sends a retrieval to all shards and merges what they answer.

Whoever asks is a member of the fleet that leases a partition of `hits`. Each shard's workers share
the partitions of the retrieval topics among them, so one whose worker has just died is silent until
the others take it over, ten seconds later. So a retrieval that lacks a shard after a share of its
time, on a partition from which that shard answers nobody any more, or does not later on, is sent
once more, to the partition farthest away: groups assign ranges, so that is another worker's if
there is one. The silent one is avoided until the group has noticed. Where workers are only slow
nothing is sent twice, which would make them slower. A shard whose replica has no room, or has
failed, is asked once more in the same way, at once. A retrieval that lacks a shard when the fleet
serves another number of them is asked of the new ones, and answers of the old ones no longer count.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    QueueFull,
    RecordError,
)
from schemas.log.clients import AssignedReader, LogProducer, bury
from schemas.log.clock import wall_ms
from schemas.log.membership import Membership
from schemas.log.retrieval.pending import Pending
from schemas.records import RetrievalRequest
from schemas.retrieval import Found, check_hits, layout_of, merged, pack_vector
from schemas.rules.sizes import SEEDS_MAX
from schemas.settings import LogSettings
from schemas.topics import check_record

log = logging.getLogger("trivium.asker")
PENDING_MAX = 4_096
SENT_AGAIN_AFTER = 0.4  # of the time that a retrieval has, at the earliest
SILENT_FOR = 0.2  # of that time
LOOK_EVERY = 0.1  # of that time, from then on
AVOIDED_MS = 10_000  # the session of the workers' groups


class Asker:
    """`start`, then `run` until cancelled; any number of `search` meanwhile, then `stop`."""

    def __init__(
        self, settings: LogSettings, codec: Codec, producer: LogProducer, membership: Membership
    ) -> None:
        """`membership` must have joined with a lease on `hits`, and be followed."""
        self._settings = settings
        self._codec = codec
        self._producer = producer
        self.membership = membership
        self._partition = membership.leases["hits"]
        self._reader = AssignedReader(
            settings, "hits", [self._partition], client_id=f"{membership.member_id}-hits"
        )
        self._pending: dict[str, tuple[Pending, int]] = {}  # by id, with the partition asked
        self._next = 0
        self._avoided_ms: dict[int, int] = {}  # until when, by partition
        self._heard_ms: dict[tuple[int, int], int] = {}  # when last, by partition and shard

    async def start(self) -> None:
        """From now on no hits are missed."""
        await self._reader.start("latest")

    async def stop(self) -> None:
        """Close."""
        await self._reader.stop()

    async def run(self) -> None:
        """Hand hits to those who wait."""
        while True:
            for record in await self._reader.batch():
                try:
                    hits = self._codec.decode(record.value)
                    check_record("hits", hits)
                    check_hits(hits)
                except RecordError as error:
                    await bury(self._producer, record, error)
                    continue
                pending, partition = self._pending.get(hits.retrieval_id, (None, 0))
                # Else it was answered already, given up, or is now asked of other shards.
                if pending is not None and pending.layout.shards == hits.shards:
                    self._heard_ms[partition, hits.shard] = wall_ms()
                    pending.take(hits)

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
        request_id: str = "",
    ) -> Found:
        """The k nearest documents of all shards, by the deadline (wall time).

        Shards that did not answer stand in `missing`. Raises NotReady where nobody serves,
        DeadlineExceeded where nobody answered, QueueFull, BrokerUnavailable, and what the shards
        refused the retrieval with.
        """
        if len(seeds) > SEEDS_MAX:
            raise InvalidRequest(f"expected at most {SEEDS_MAX} seeds, found {len(seeds)}", "seeds")
        request = RetrievalRequest(
            retrieval_id=uuid.uuid4().hex,
            request_id=request_id,
            asker_id=self.membership.member_id,
            reply_partition=self._partition,
            collection=collection,
            vector=pack_vector(vector),
            k=k,
            top_m=top_m,
            width=width,
            patience=patience,
            filter=filter,
            seeds=tuple(seeds),
            wants_seeds=wants_seeds,
            asked_ms=wall_ms(),
            deadline_ms=deadline_ms,
        )
        return await self._ask(f"retrieval.{kind}", request)

    async def _ask(self, topic: str, request: RetrievalRequest) -> Found:
        if not self.membership.is_valid():
            raise BrokerUnavailable("the log does not answer; hits would not arrive")
        layout = layout_of(self.membership.view, wall_ms())
        if not layout.living:
            raise NotReady(
                "no retrieval worker is ready; start some with `trivium retrieval` or "
                "`trivium up --retrieval 1`"
            )
        if len(self._pending) >= PENDING_MAX:
            raise QueueFull(f"{PENDING_MAX} retrievals are under way; ask less at once")
        pending = Pending(layout)
        try:
            await self._until_answered(topic, request, pending)
        except TimeoutError:
            log.info("%s: the deadline passed", request.retrieval_id)
        finally:
            for retrieval_id in (request.retrieval_id, _second(request).retrieval_id):
                self._pending.pop(retrieval_id, None)
        answers = pending.refused | pending.answers
        return merged(request.retrieval_id, answers, pending.layout.shards, request.k)

    async def _until_answered(
        self, topic: str, request: RetrievalRequest, pending: Pending
    ) -> None:
        left_ms = request.deadline_ms - wall_ms()
        if left_ms <= 0:
            raise DeadlineExceeded(f"the deadline passed {-left_ms} ms ago; ask with a later one")
        async with asyncio.timeout(left_ms / 1000):
            partition = self._next = self._choose(self._next + 1)
            await self._send(topic, request, partition, pending)
            wait_ms = SENT_AGAIN_AFTER * left_ms
            while not await _is_set(pending.done, wait_ms) or pending.wants_another():
                wait_ms = LOOK_EVERY * left_ms
                if self._begins_again(pending, partition, wall_ms() - SILENT_FOR * left_ms):
                    partition = self._choose(partition + self._settings.retrieval_partitions // 2)
                    await self._send(topic, _second(request), partition, pending)

    def _begins_again(self, pending: Pending, partition: int, since_ms: float) -> bool:
        """Whether to send it again: to the present shards, to other replicas, or elsewhere."""
        layout = layout_of(self.membership.view, wall_ms())
        if layout.living and layout.shards != pending.layout.shards:
            pending.move(layout)
            return True
        if pending.is_again:
            return False
        if not pending.wants_another():
            if not self._is_silent(pending, partition, since_ms):
                return False
            self._avoided_ms[partition] = wall_ms() + AVOIDED_MS
        pending.begin_again()
        return True

    def _is_silent(self, pending: Pending, partition: int, since_ms: float) -> bool:
        """Whether one of the shards that lack has answered nothing from a partition since then."""
        lacking = pending.layout.living - pending.answers.keys()
        return any(self._heard_ms.get((partition, shard), 0) < since_ms for shard in lacking)

    def _choose(self, first: int) -> int:
        """The first partition from there on; those avoided only where all are."""
        count, now_ms = self._settings.retrieval_partitions, wall_ms()
        turns = [(first + ahead) % count for ahead in range(count)]
        found = [p for p in turns if self._avoided_ms.get(p, 0) <= now_ms]
        return (found or turns)[0]

    async def _send(
        self, topic: str, request: RetrievalRequest, partition: int, pending: Pending
    ) -> None:
        self._pending[request.retrieval_id] = (pending, partition)
        try:
            await (
                await self._producer.send(
                    topic, request, key=request.retrieval_id, partition=partition
                )
            )
        except KafkaError as error:
            raise BrokerUnavailable(f"the retrieval was not sent: {error}") from error


async def _is_set(event: asyncio.Event, within_ms: float) -> bool:
    try:
        async with asyncio.timeout(within_ms / 1000):
            return await event.wait()
    except TimeoutError:
        return False


def _second(request: RetrievalRequest) -> RetrievalRequest:
    """The same under an id of its own, so that its hits tell which partition they come from."""
    return replace(request, retrieval_id=request.retrieval_id + "-2")

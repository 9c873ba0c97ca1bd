"""Sends a retrieval to the shards and waits for the answers; decides when to send it again.

A shard replica that has just died is silent until its group notices, ten seconds later. So if a
shard is missing that is silent on the retrieval's partition, the retrieval is sent once more, to
the partition farthest away (`routes.py`). Slow workers get nothing twice, which would make them
slower. The README of this folder has the other cases. A text goes through the embedding pool, which
fills in its vector; if the only embedding worker is silent, the text is sent once more, for a
search by words only.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable, DeadlineExceeded, NotReady, QueueFull
from schemas.records import Hits, RetrievalRequest
from schemas.retrieval import WORDS
from schemas.rules.embedders import public_name
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from streams.log.retrieval.results import (
    RetrievalResult,
    ShardLayout,
    embedding_workers,
    layout_of,
    merge_hits,
    partitions_at,
)
from streams.log.retrieval.routes import EMBEDDING, PoolRoutes, Route


@dataclass(slots=True, eq=False)
class PendingRetrieval:
    """A retrieval that waits for the answers of its shards."""

    layout: ShardLayout
    answers: dict[int, Hits] = field(default_factory=dict)
    refused: dict[int, Hits] = field(default_factory=dict)  # refusals before it was sent again
    was_resent: bool = False
    done_event: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, hits: Hits) -> None:
        former_hits = self.answers.get(hits.shard)
        if former_hits is None or former_hits.error is not None:
            self.answers[hits.shard] = hits
        if self.answers.keys() >= self.layout.living or self.wants_another():
            self.done_event.set()

    def wants_another(self) -> bool:
        """Return whether another shard replica may answer where one has failed."""
        return not self.was_resent and any(map(_is_the_replicas, self.answers.values()))

    def resend(self) -> None:
        """Drop the answers of replicas that refused, to ask others; keep the other answers."""
        self.was_resent = True
        self.refused = {s: hits for s, hits in self.answers.items() if _is_the_replicas(hits)}
        for shard in self.refused:
            del self.answers[shard]
        self.done_event.clear()

    def change_layout(self, layout: ShardLayout) -> None:
        """Start again with another number of shards, for which the answers so far are useless."""
        self.layout = layout
        self.answers.clear()
        self.resend()


def _is_the_replicas(hits: Hits) -> bool:
    late = DeadlineExceeded.code
    return hits.error is not None and hits.error.retriable and hits.error.code != late


log = logging.getLogger("trivium.asker")
PENDING_MAX = 4_096
SENT_AGAIN_AFTER = 0.4  # of the time to a retrieval's deadline, at the earliest
SILENT_FOR = 0.2  # of that time
LOOK_EVERY = 0.1  # of that time, after `SENT_AGAIN_AFTER`


class RetrievalExchange:
    """Exchanges retrievals: any number of `ask` at once; `take` gets the hits."""

    def __init__(
        self, producer: LogProducer, membership: Membership, direct: Route, by_pool: PoolRoutes,
        place: str,
    ) -> None:  # fmt: skip
        """Create an exchange; `direct` is the route to the shards, `by_pool` has those through
        embedding pools."""
        self._producer, self._membership, self._place = producer, membership, place
        self._direct, self._by_pool = direct, by_pool
        self._pending: dict[
            str, tuple[PendingRetrieval, Route, int]
        ] = {}  # by id, with route and partition

    def take(self, hits: Hits) -> None:
        """Take valid hits of a shard."""
        pending_entry = self._pending.get(hits.retrieval_id)
        # Else it was answered, cancelled, or sent to other shards since.
        if pending_entry is not None and pending_entry[0].layout.shards == hits.shards:
            pending, route, partition = pending_entry
            for who in (hits.shard, EMBEDDING):
                route.note_answer(partition, who, wall_ms())
            pending.take(hits)

    async def ask(self, request: RetrievalRequest) -> RetrievalResult:
        """Return the shards' result by the deadline; raises as `RetrievalClient.search`."""
        layout = layout_of(self._membership.view, wall_ms())
        if not layout.living:
            raise NotReady(
                "no retrieval worker is ready; start some with `trivium run retrieval` or "
                "`trivium up --retrieval 1`"
            )
        if len(self._pending) >= PENDING_MAX:
            raise QueueFull(f"{PENDING_MAX} retrievals are under way; ask less at once")
        pending = PendingRetrieval(layout)
        try:
            await self._until_answered(request, pending)
        except TimeoutError:
            log.info("%s: the deadline passed", request.retrieval_id)
        finally:
            for retrieval_id in (request.retrieval_id, _second(request).retrieval_id):
                self._pending.pop(retrieval_id, None)
        answers = pending.refused | pending.answers
        shards, by_text = pending.layout.shards, bool(request.text)
        return merge_hits(
            request.retrieval_id, answers, shards, request.k,
            by_text=by_text, quoted=request.quoted,
        )  # fmt: skip

    async def _until_answered(self, request: RetrievalRequest, pending: PendingRetrieval) -> None:
        left_ms = request.deadline_ms - wall_ms()
        if left_ms <= 0:
            raise DeadlineExceeded(f"the deadline passed {-left_ms} ms ago; ask with a later one")
        async with asyncio.timeout(left_ms / 1000):
            route = self._route(request)
            partition = route.next(wall_ms(), self._near())
            await self._send(request, route, partition, pending)
            wait_ms = SENT_AGAIN_AFTER * left_ms
            while not await _is_set(pending.done_event, wait_ms) or pending.wants_another():
                wait_ms = LOOK_EVERY * left_ms
                since_ms = wall_ms() - SILENT_FOR * left_ms
                is_heard = bool(pending.answers or pending.refused)
                if self._should_resend(pending, route, partition, since_ms):
                    is_heard |= not route.is_silent(partition, [EMBEDDING], since_ms)
                    second_request = _second(request if is_heard else self._fallback(request))
                    route = self._route(second_request)
                    partition = route.farthest(partition, wall_ms())
                    await self._send(second_request, route, partition, pending)

    def _near(self) -> Collection[int]:
        """Return the partitions that replicas of the index in this place serve."""
        if not self._place:
            return ()
        return partitions_at(self._membership.view, self._place, wall_ms())

    def _route(self, request: RetrievalRequest) -> Route:
        if not _wants_vector(request):
            return self._direct
        return self._by_pool.of(public_name(request.embedder))

    def _should_resend(
        self, pending: PendingRetrieval, route: Route, partition: int, since_ms: float
    ) -> bool:
        """Return whether to send it again: to the current shards, other replicas, or elsewhere."""
        layout = layout_of(self._membership.view, wall_ms())
        if layout.living and layout.shards != pending.layout.shards:
            pending.change_layout(layout)
            return True
        if pending.was_resent:
            return False
        if not pending.wants_another():
            lacking = pending.layout.living - pending.answers.keys()
            if not route.is_silent(partition, lacking, since_ms):
                return False
            route.avoid(partition, wall_ms())
        pending.resend()
        return True

    def _fallback(self, request: RetrievalRequest) -> RetrievalRequest:
        """Return the request to send again; by words only with at most one worker that may embed
        it."""
        if not _wants_vector(request):
            return request
        pool = public_name(request.embedder)
        workers = embedding_workers(self._membership.view, wall_ms(), pool)
        return request if len(workers) > 1 else by_words(request)

    async def _send(
        self, request: RetrievalRequest, route: Route, partition: int, pending: PendingRetrieval
    ) -> None:
        self._pending[request.retrieval_id] = (pending, route, partition)
        topic = "embeddings" if _wants_vector(request) else f"retrieval.{request.urgency}"
        key = request.retrieval_id
        try:
            await (await self._producer.send(topic, request, key=key, partition=partition))
        except KafkaError as error:
            raise BrokerUnavailable(f"the retrieval was not sent: {error}") from error


async def _is_set(event: asyncio.Event, within_ms: float) -> bool:
    try:
        async with asyncio.timeout(within_ms / 1000):
            return await event.wait()
    except TimeoutError:
        return False


def _wants_vector(request: RetrievalRequest) -> bool:
    """Return whether a request goes through the embedding pool."""
    return bool(request.text) and not request.vector and request.mode != WORDS


def by_words(request: RetrievalRequest) -> RetrievalRequest:
    """Return a search by words only, for which no model has to make a vector."""
    return replace(request, mode=WORDS, embedder="")


def _second(request: RetrievalRequest) -> RetrievalRequest:
    """Return the request with another id, so that its hits show which partition answered."""
    return replace(request, retrieval_id=request.retrieval_id + "-2")

"""Runs searches of requests in the background, and passes each result on as a `Retrieved`.

A router leases a partition of `hits` besides its membership, and searches with `RetrievalClient`.
Nothing here blocks the router: a search that fails, that no worker can do, or that exceeds the
limit gets its error as result, and a router without a partition of `hits` keeps serving, and tries
again to get one. The choices of a call need the same search, so they share one while it is active;
it continues if any of their requests ends. `streams/core/handlers/retrievals.py` handles each
`Retrieved`. Called by `streams/agents/router.py`.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, cast

from schemas.codec import Codec
from schemas.errors import NotReady, QueueFull, TriviumError
from schemas.records import Quoted, Request, Retrieval, Retrieved
from schemas.rules.sizes import PASSAGES_MAX
from schemas.settings import LogSettings
from streams.core.effects import StartRetrieval
from streams.core.requests.context import quoted_in
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import LogProducer
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from streams.log.retrieval.client import LeasedRetrievalClient, RetrievalClient
from streams.log.retrieval.results import RetrievalResult, retrieved_record

log = logging.getLogger(__name__)

_CallKey = tuple[str, str, Retrieval, tuple[Quoted, ...]]  # a call's id, tenant, search, quotes


class Retriever:
    """Runs searches: `ask` at any time, `run` beside the membership until cancelled; `stop`."""

    def __init__(
        self,
        settings: LogSettings,
        codec: Codec,
        producer: LogProducer,
        membership: Membership,
        *,
        asks_max: int,
        answer: Callable[[Retrieved, int], None],
    ) -> None:
        """Create a retriever; it calls `answer`, which must not block, with each result and the
        session's partition."""
        self._membership = membership
        self._asks_max = asks_max
        self._answer = answer
        self._leased = LeasedRetrievalClient(
            lambda member: RetrievalClient(settings, codec, producer, member), membership
        )
        self._asks: set[asyncio.Task[None]] = set()
        self._searches: dict[_CallKey, asyncio.Task[RetrievalResult]] = {}

    def ask(self, ask: StartRetrieval) -> None:
        """Begin a search in the background; answer with QueueFull above `asks_max`."""
        if len(self._asks) >= self._asks_max:
            error = QueueFull(f"{self._asks_max} searches are under way (router.retrievals_max)")
            self._answer(self._failed(ask, wall_ms(), error), ask.partition)
            return
        task = asyncio.create_task(self._search(ask))
        self._asks.add(task)
        task.add_done_callback(self._asks.discard)

    async def _search(self, ask: StartRetrieval) -> None:
        asked_ms = wall_ms()
        try:
            retrieved = await self._retrieve(ask, asked_ms)
        except TriviumError as error:
            retrieved = self._failed(ask, asked_ms, error)
        except Exception:
            log.exception("%s: a search failed over a bug", ask.request.request_id)
            retrieved = self._failed(ask, asked_ms, TriviumError("the search failed; report this"))
        self._answer(retrieved, ask.partition)

    async def _retrieve(self, ask: StartRetrieval, asked_ms: int) -> Retrieved:
        result = await asyncio.shield(self._search_for_call(ask))
        return retrieved_record(
            result,
            request_id=ask.request.request_id,
            session_id=ask.request.session_id,
            router_id=self._membership.member_id,
            asked_ms=asked_ms,
            history=ask.history,
            changed=tuple(sorted(result.changed)),
        )

    def _search_for_call(self, ask: StartRetrieval) -> asyncio.Task[RetrievalResult]:
        """Return the search of the request's call: the active one, or a new one."""
        request, retrieval = ask.request, ask.request.retrieval
        assert retrieval is not None, f"{request.request_id}: wants nothing to be found"
        quoted = quoted_in(ask.history)
        call_key = (request.parent_id, request.tenant, retrieval, quoted)
        search = self._searches.get(call_key)
        if search is None:
            new_search = asyncio.create_task(self._search_text(request, retrieval, quoted))
            search = self._searches[call_key] = new_search
            search.add_done_callback(lambda _: self._searches.pop(call_key))
        return search

    async def _search_text(
        self, request: Request, retrieval: Retrieval, quoted: tuple[Quoted, ...]
    ) -> RetrievalResult:
        if (client := self._leased.client) is None:
            raise NotReady("this router has no partition of hits (log.asker_partitions)")
        return await client.search_text(
            retrieval.query,
            collection=retrieval.collection,
            k=min(retrieval.k, PASSAGES_MAX),
            deadline_ms=retrieval.by_ms,
            mode=cast(Literal["hybrid", "vector", "words"], retrieval.mode),  # it checks
            filter=retrieval.filter,
            min_score=retrieval.min_score,
            tenant=request.tenant,
            request_id=request.request_id,
            quoted=quoted,
        )

    def _failed(self, ask: StartRetrieval, asked_ms: int, error: TriviumError) -> Retrieved:
        return Retrieved(
            request_id=ask.request.request_id,
            session_id=ask.request.session_id,
            router_id=self._membership.member_id,
            error=error.to_wire(),
            asked_ms=asked_ms,
            at_ms=wall_ms(),
            history=ask.history,
        )

    async def run(self) -> None:
        """Lease a partition and pass hits to the searches that wait, until cancelled."""
        await self._leased.run()

    async def stop(self) -> None:
        """Cancel all searches; the next owner of their requests searches again."""
        await cancel_and_wait(*self._asks, *self._searches.values())

"""Searches the retrieval pool for answers while they are generated, in background tasks.

A worker leases a partition of `hits` when the first work arrives whose answer may search, and
searches through `RetrievalClient`. The result of a failed search is its error, and the answer
continues without passages. `workers/llm/probing/` decides what to do with a result.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal, cast

from schemas.errors import NotReady, TriviumError
from schemas.records import Retrieved
from streams.log.cancellation import cancel_and_wait
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from streams.log.retrieval.client import LeasedRetrievalClient, RetrievalClient
from streams.log.retrieval.results import RetrievalResult, retrieved_record
from workers.llm.probing.answer import ProbeAsk, failed_result

log = logging.getLogger("trivium.worker")
OnResult = Callable[[Retrieved, Sequence[str]], None]


class Prober:
    """Runs searches; call `ask` at any time, `run` until cancelled, then `stop`."""

    def __init__(
        self,
        make: Callable[[Membership], RetrievalClient],
        membership: Membership,
        on_result: OnResult,
    ) -> None:
        """Create one; `make` gets a membership that has leased a partition of `hits`. `on_result`
        gets each result, and seeds for a warm search."""
        self._on_result = on_result
        self._leased = LeasedRetrievalClient(make, membership)
        self._needs_lease = asyncio.Event()
        self._asks: set[asyncio.Task[None]] = set()

    def request_lease(self) -> None:
        """Let `run` lease a partition: an answer may search."""
        self._needs_lease.set()

    async def run(self) -> None:
        """Lease a partition when `request_lease` is called, then pass hits to their searches."""
        await self._needs_lease.wait()
        await self._leased.run()

    def ask(self, ask: ProbeAsk) -> None:
        """Start a search in a background task."""
        task = asyncio.create_task(self._search(ask))
        self._asks.add(task)
        task.add_done_callback(self._asks.discard)

    async def _search(self, ask: ProbeAsk) -> None:
        seeds: Sequence[str] = ()
        try:
            result = await self._query(ask)
            record, seeds = _record(ask, result), result.seeds
        except TriviumError as error:
            record = failed_result(ask, error.to_wire(), wall_ms())
        except Exception:
            log.exception("%s: a probe failed over a bug", ask.work.request_id)
            bug = TriviumError("the probe failed; report this")
            record = failed_result(ask, bug.to_wire(), wall_ms())
        self._on_result(record, seeds)

    async def _query(self, ask: ProbeAsk) -> RetrievalResult:
        asker, probes = self._leased.client, ask.work.probes
        assert probes is not None and probes.retrieval.probing is not None
        if asker is None:
            raise NotReady("this worker has no partition of hits (log.asker_partitions)")
        retrieval = probes.retrieval
        return await asker.search_text(
            ask.text,
            collection=retrieval.collection,
            k=ask.k,
            deadline_ms=ask.deadline_ms,
            kind="decode",
            mode=cast(Literal["hybrid", "vector", "words"], retrieval.mode),  # checked there
            filter=retrieval.filter,
            min_score=probes.retrieval.probing.min_score,
            tenant=probes.tenant,
            seeds=ask.seeds,
            wants_seeds=probes.retrieval.probing.is_warm,
            request_id=ask.work.request_id,
        )

    async def stop(self) -> None:
        """Cancel the searches under way."""
        await cancel_and_wait(*self._asks)


def _record(ask: ProbeAsk, result: RetrievalResult) -> Retrieved:
    """Return the result as a record; the answer chooses from its passages."""
    return retrieved_record(
        result,
        request_id=ask.work.request_id,
        session_id=ask.work.session_id,
        router_id=ask.work.worker_id,
        asked_ms=ask.asked_ms,
        attempt=ask.work.attempt,
        probe=ask.probe,
    )

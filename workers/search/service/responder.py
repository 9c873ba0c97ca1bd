"""Turns a retrieval into hits: checks it, searches, and says why where it cannot.

Every retrieval gets its hits, failed ones too; nothing that is asked ends the worker.
"""

import logging
from typing import Any

from schemas.errors import DeadlineExceeded, EngineFailed, InvalidRequest, TriviumError
from schemas.log.clock import wall_ms
from schemas.records import Hits, RetrievalRequest, WireError
from schemas.retrieval import pack_vector, unpack_vector
from schemas.rules.sizes import SEEDS_MAX
from workers.search.engine.engine import SearchEngine
from workers.search.index import expressions
from workers.search.index.index import Index
from workers.search.index.kinds import Kind
from workers.search.index.query import Answer, Query
from workers.search.service.collections import Collections
from workers.search.service.settings import RetrievalSettings, ShardPlace

log = logging.getLogger("trivium.retrieval")


class Responder:
    """Answers retrievals from the collections of one shard."""

    def __init__(
        self,
        engine: SearchEngine,
        collections: Collections,
        settings: RetrievalSettings,
        *,
        worker_id: str,
        place: ShardPlace,
    ) -> None:
        self._engine = engine
        self._collections = collections
        self._settings = settings
        self._worker_id, self._place = worker_id, place
        self.searches_total = 0
        self.misses_total = 0

    async def hits(self, request: RetrievalRequest, kind: Kind) -> Hits:
        """The hits, or the error that stands in their place; raises nothing."""
        began_ms = wall_ms()
        self.searches_total += 1
        try:
            if request.deadline_ms <= began_ms:
                raise DeadlineExceeded(
                    f"the deadline passed {began_ms - request.deadline_ms} ms before the retrieval "
                    "was read; give it more time"
                )
            index = self._collections.get(request.collection)
            answer = await self._engine.search(index, self._query(request, kind, index))
        except TriviumError as error:
            self.misses_total += isinstance(error, DeadlineExceeded)
            return self._record(request, began_ms, error=error.to_wire())
        except Exception:
            log.exception("retrieval %s failed", request.retrieval_id)
            broken = EngineFailed(f"the search failed; the log of {self._worker_id} says why")
            return self._record(request, began_ms, error=broken.to_wire())
        return self._answered(request, began_ms, answer)

    def refused(self, request: RetrievalRequest, error: TriviumError) -> Hits:
        """In place of hits that nobody can send."""
        return self._record(request, wall_ms(), error=error.to_wire())

    def _query(self, request: RetrievalRequest, kind: Kind, index: Index) -> Query:
        if len(request.seeds) > SEEDS_MAX:
            raise InvalidRequest(
                f"expected at most {SEEDS_MAX} seeds, found {len(request.seeds)}", "seeds"
            )
        row_of = index.rows.row_of
        return Query(
            vector=unpack_vector(request.vector),
            k=request.k,
            top_m=request.top_m or self._settings.top_m,
            width=request.width or self._settings.width,
            patience=request.patience or self._settings.patience,
            where=expressions.parse(request.filter) if request.filter else None,
            seeds=[row for seed in request.seeds if (row := row_of.get(seed)) is not None],
            kind=kind,
            deadline_ms=request.deadline_ms,
        )

    def _answered(self, request: RetrievalRequest, began_ms: int, answer: Answer) -> Hits:
        return self._record(
            request,
            began_ms,
            document_ids=tuple(map(str, answer.ids)),
            distances=pack_vector(answer.distances),
            seeds=tuple(map(str, answer.top_ids())) if request.wants_seeds else (),
            exact=answer.exact,
            extends=answer.extends,
            distances_computed=answer.computed,
        )

    def _record(
        self,
        request: RetrievalRequest,
        began_ms: int,
        *,
        error: WireError | None = None,
        **found: Any,
    ) -> Hits:
        now_ms = wall_ms()
        return Hits(
            retrieval_id=request.retrieval_id,
            request_id=request.request_id,
            worker_id=self._worker_id,
            shard=self._place.shard,
            shards=self._place.shards,
            collection=request.collection,
            error=error,
            took_ms=max(0, now_ms - began_ms),  # wall clocks are set back
            at_ms=now_ms,
            **found,
        )

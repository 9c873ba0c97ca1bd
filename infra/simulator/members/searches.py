"""The retrieval pool of a simulated cluster, as its callers see it: they get an answer or none.

A seed and the request's id decide which requests want retrieval and how each search ends: passages
come soon, late, never, twice or different, or an error comes. Two routers that search for the same
request get different passages. A search of a router that has died is sometimes written all the
same, as it was in flight. Workers search during some answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from infra.simulator.log.clock import Clock
from infra.simulator.traffic.script import SimConversation
from schemas.errors import UnknownCollection
from schemas.records import Passage, Probing, Retrieval, Retrieved
from schemas.rules.tokens import pack_tokens
from streams.core.effects import StartRetrieval
from streams.core.requests.context import quoted_in
from workers.llm.probing.answer import ProbeAsk, failed_result

SHARE = 0.6  # of requests that want retrieval
BY_MS = 150  # deadline of a search after the request's arrival
LATE_MS = 400  # the slowest answer, after the search was sent
TOKENS_MAX = 96
ROOM_TOKENS = 600
CHANGED_SHARE = 0.2  # share of quoted documents that were edited
_WORD = 1 << 29  # first token id of passages, above those of conversations
Write = Callable[[Retrieved], None]
Answer = Callable[[Retrieved, Sequence[str]], None]
PROBING = Probing(
    every=16,
    lookahead=6,
    probes_max=4,
    tokens_max=TOKENS_MAX,
    stall_ms=80,
    lead=pack_tokens([_WORD + 4]),
    joint=pack_tokens([_WORD + 5]),
    trail=pack_tokens([_WORD + 6]),
)


def retrieval_of(
    conversation: SimConversation, index: int, now_ms: float, probing: Probing | None = None
) -> Retrieval:
    """Return the retrieval of a turn. Passages go before its question, which ends two tokens before
    the prompt does."""
    turn, before = conversation.turns[index], conversation.turns[index - 1] if index else None
    history = 0 if before is None else before.prompt_tokens + before.output_tokens
    return Retrieval(
        collection="handbook",
        query=conversation.name,
        k=3,
        by_ms=int(now_ms) + BY_MS,
        tokens_max=TOKENS_MAX,
        at=history + 3,
        lead=pack_tokens([_WORD]),
        joint=pack_tokens([_WORD + 1]),
        trail=pack_tokens([_WORD + 2]),
        tail_at=turn.prompt_tokens - 2,
        tail=pack_tokens([_WORD + 3]),
        history_tokens=history,
        room_tokens=ROOM_TOKENS,
        probing=probing,
    )


class SimRetrievalPool:
    """Answers the searches of routers, through `write`, and those of workers."""

    def __init__(self, clock: Clock, seed: int, write: Write, *, probes: bool = False) -> None:
        """With `probes`, half of the requests with retrieval also search during their answers."""
        self._probes = probes
        self._clock, self._seed, self._write = clock, seed, write
        self._search_count = 0

    def wants(self, request_id: str) -> bool:
        """Return whether a request wants retrieval."""
        return self._draw(request_id, 0).random() < SHARE

    def probing(self, request_id: str) -> Probing | None:
        """Return how a request with retrieval searches during its answer; None: not at all."""
        return PROBING if self._probes and self._draw(request_id, 1 << 30).random() < 0.5 else None

    def probe(self, ask: ProbeAsk, answer: Answer) -> None:
        """Search for a worker, which may be gone when the answer comes."""
        self._search_count += 1
        draw = self._draw(ask.work.request_id, self._search_count)
        kind = draw.random()
        if kind < 0.1:
            return  # no answer comes
        after_ms = draw.uniform(5.0, 60.0) if kind < 0.8 else draw.uniform(60.0, LATE_MS)
        error = UnknownCollection("handbook: no such collection").to_wire()
        retrieved = failed_result(ask, error, int(self._clock.now_ms + after_ms))
        if draw.random() > 0.15:
            count = int(draw.integers(0, 3))
            passages = tuple(_passage(draw) for _ in range(count))
            retrieved = replace(retrieved, error=None, passages=passages, shards=2)
        self._clock.after(after_ms, lambda: answer(retrieved, ()))

    def ask(self, ask: StartRetrieval, is_alive: Callable[[], bool]) -> None:
        """Search for a router; `is_alive` returns whether its process is still alive."""
        self._search_count += 1
        draw = self._draw(ask.request.request_id, self._search_count)
        kind = draw.random()
        retrieved = self._draw_result(ask, draw)
        if kind < 0.1:
            return  # no answer comes
        after_ms = draw.uniform(5.0, 60.0) if kind < 0.8 else draw.uniform(60.0, LATE_MS)
        is_written = bool(draw.random() < 0.3)
        self._write_later(retrieved, after_ms, lambda: is_alive() or is_written)
        if kind < 0.3:
            self._write_later(
                self._draw_result(ask, draw), after_ms + draw.uniform(0.0, 50.0), is_alive
            )

    def _write_later(
        self, retrieved: Retrieved, after_ms: float, is_written: Callable[[], bool]
    ) -> None:
        def write() -> None:
            if is_written():
                self._write(replace(retrieved, at_ms=int(self._clock.now_ms)))

        self._clock.after(after_ms, write)

    def _draw_result(self, ask: StartRetrieval, draw: np.random.Generator) -> Retrieved:
        count, error = int(draw.integers(0, 5)), None
        if draw.random() < 0.15:
            count, error = 0, UnknownCollection("handbook: no such collection").to_wire()
        return Retrieved(
            request_id=ask.request.request_id,
            session_id=ask.request.session_id,
            router_id="router-0",
            passages=tuple(_passage(draw) for _ in range(count)),
            error=error,
            shards=2,
            missing=(1,) if draw.random() < 0.1 else (),
            asked_ms=int(self._clock.now_ms),
            at_ms=0,
            history=ask.history,
            changed=_changed(ask, draw),
        )

    def _draw(self, request_id: str, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, crc32(request_id.encode()), number])


def _changed(ask: StartRetrieval, draw: np.random.Generator) -> tuple[str, ...]:
    """Return documents that earlier turns quoted and that were edited since then."""
    quoted = sorted({passage.document_id for passage in quoted_in(ask.history)})
    return tuple(name for name in quoted if draw.random() < CHANGED_SHARE)


def _passage(draw: np.random.Generator) -> Passage:
    name, length = int(draw.integers(1 << 16)), int(draw.integers(1, 60))
    tokens = [_WORD + 16 + name * 64 + place for place in range(length)]
    return Passage(
        passage_id=f"d{name}#0",
        document_id=f"d{name}",
        text=f"passage {name}",
        tokens=pack_tokens(tokens),
        score=float(draw.random()),
    )

"""A small world with a clock, in which a placer's choices have consequences that it can learn.

Prefill and append-prefill are done one after another on each worker; a prompt that is computed
beside a batch stalls every stream of it. The world's laws are written for these tests alone.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import mean
from typing import Any

from schemas.records import Mode, Reason, Role
from streams.core.requests.live import NOBODY, Placement, RequestCase
from tests.streams.core.placement.placer_fixture import PlacerFixture, case, pair, session


@dataclass
class Laws:
    """Times in ms; may be changed while the world runs."""

    prefill_base: float = 20.0
    prefill_token: float = 0.05
    append_base: float = 20.0
    append_token: float = 0.05
    stall: float = 0.3  # share of an append's time for which its batch stands still
    step: float = 10.0
    step_request: float = 0.2
    transfer_token: float = 0.01
    noise: float = 0.1


@dataclass
class SimulatedTurn:
    """One request and what became of it."""

    number: int
    at_ms: float
    request_case: RequestCase
    later: bool
    placed: Placement
    placed_ms: float
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    stalled_ms: float = 0.0
    seen_stall_ms: float = 0.0
    decode: str = ""
    computed: int = 0
    first_ms: float = 0.0


@dataclass
class QueueSimulation:
    """Plays turns on a scene; deterministic by seed."""

    scene: PlacerFixture
    laws: Laws
    seed: int
    answered_turns: list[SimulatedTurn] = field(default_factory=list)
    placed: list[SimulatedTurn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = 0
        self._busy: dict[str, float] = {}
        self._batches: dict[str, dict[int, SimulatedTurn]] = {}
        self._waiting: list[tuple[float, RequestCase, bool, int]] = []
        self._handing: list[SimulatedTurn] = []
        self._count = 0
        self._start_ms = self.scene.now_ms
        self._beat()

    def _at(self, at_ms: float, what: Callable[[], None]) -> None:
        self._seq += 1
        heapq.heappush(self._events, (at_ms, self._seq, what))

    def _beat(self) -> None:
        self.scene.beat()
        self._at(self.scene.now_ms + 500, self._beat)

    def _noisy(self, ms: float) -> float:
        return ms * max(0.2, self._random.gauss(1.0, self.laws.noise))

    def run(
        self,
        turns: int,
        per_s: float,
        later_share: float,
        new_tokens: int,
        answer: int,
        context: int = 2_000,
    ) -> None:
        """So many requests arrive, Poisson; then all of them end."""
        at_ms = float(self.scene.now_ms)
        for _ in range(turns):
            at_ms += self._random.expovariate(per_s) * 1_000
            later = self._random.random() < later_share
            size = max(8, int(new_tokens * self._random.uniform(0.5, 1.5)))
            on = self._random.choice(sorted(self._decodes()))
            self._at(
                at_ms,
                lambda a=at_ms, x=later, s=size, w=on: self._arrive(  # type: ignore[misc]  # defaults bind
                    a, x, s, answer, context, w
                ),
            )
        last = len(self.placed) + turns
        while len(self.answered_turns) < last:
            at, _, what = heapq.heappop(self._events)
            self.scene.now_ms = max(self.scene.now_ms, int(at))
            what()

    def _decodes(self) -> list[str]:
        return [worker.worker_id for worker in self.scene.pools.pools[Role.DECODE].workers]

    def _arrive(
        self, at: float, later: bool, size: int, answer: int, context: int, on: str
    ) -> None:
        last_session = session(on, context) if later else None
        tokens = context + size if later else context
        request_case = case(
            tokens,
            last_session,
            max_tokens=answer,
            request_id=f"r{self._count}",
            deadline_ms=self.scene.now_ms + 60_000,
        )
        self._waiting.append((at, request_case, later, self._count))
        self._count += 1
        self._pump()

    def _pump(self) -> None:
        for turn in list(self._handing):
            self._hand(turn)
        while self._waiting:
            at, request_case, later, number = self._waiting[0]
            request_case.waiting = len(self._waiting)
            placed = self.scene.place(request_case)
            if placed is None:
                return
            self._waiting.pop(0)
            turn = SimulatedTurn(number, at, request_case, later, placed, self.scene.now_ms)
            self.placed.append(turn)
            self._start(turn)

    def _start(self, turn: SimulatedTurn) -> None:
        laws, placed, now = self.laws, turn.placed, self.scene.now_ms
        if placed.prefill is not None:
            turn.computed = turn.request_case.prompt_tokens - placed.prefill_cached_tokens
            self.scene.fleet.add_request(placed.prefill, turn.computed)
            took = self._noisy(laws.prefill_base + laws.prefill_token * turn.computed)
            name = placed.prefill.worker_id
            end = max(float(now), self._busy.get(name, 0.0)) + took
            self._busy[name] = end
            self._at(end, lambda: self._prefilled(turn, end))
            return
        assert placed.decode is not None
        turn.computed = turn.request_case.prompt_tokens - placed.decode_cached_tokens
        self.scene.fleet.add_request(placed.decode, turn.request_case.prompt_tokens)
        name = turn.decode = placed.decode.worker_id
        took = self._noisy(laws.append_base + laws.append_token * turn.computed)
        end = max(float(now), self._busy.get(name, 0.0)) + took
        self._busy[name] = end
        self._at(end, lambda: self._appended(turn, end, took))

    def _prefilled(self, turn: SimulatedTurn, end: float) -> None:
        worker = turn.placed.prefill
        assert worker is not None
        self.scene.fleet.release(worker.life, Role.PREFILL, turn.computed)
        assert turn.request_case.note is not None
        took_ms = end - turn.placed_ms
        self.scene.estimates.observe_prefill(
            turn.request_case.note, worker.life, turn.computed, took_ms
        )
        turn.ttft_ms, turn.first_ms = end - turn.at_ms, end
        self._handing.append(turn)
        self._pump()

    def _hand(self, turn: SimulatedTurn) -> None:
        worker, _ = self.scene.placer.handoff(
            turn.request_case, self.scene.fleet, self.scene.now_ms, prefill=NOBODY, decode=NOBODY
        )
        if worker is None:
            return
        self._handing.remove(turn)
        self.scene.fleet.add_request(worker, 0)
        turn.decode = worker.worker_id
        moving = self.laws.transfer_token * turn.request_case.prompt_tokens
        turn.stalled_ms += moving
        self._decode(turn)

    def _appended(self, turn: SimulatedTurn, end: float, took: float) -> None:
        turn.ttft_ms, turn.first_ms = end - turn.at_ms, end
        for neighbour in self._batches.get(turn.decode, {}).values():
            neighbour.stalled_ms += self.laws.stall * took
        self._decode(turn)

    def _decode(self, turn: SimulatedTurn) -> None:
        batch = self._batches.setdefault(turn.decode, {})
        batch[turn.number] = turn
        step = self._noisy(self.laws.step + self.laws.step_request * len(batch))
        end = turn.first_ms + turn.stalled_ms + step * turn.request_case.max_tokens
        turn.seen_stall_ms = turn.stalled_ms
        self._at(end, lambda: self._answered(turn, end))

    def _answered(self, turn: SimulatedTurn, end: float) -> None:
        if turn.stalled_ms > turn.seen_stall_ms:
            end += turn.stalled_ms - turn.seen_stall_ms
            turn.seen_stall_ms = turn.stalled_ms
            self._at(end, lambda: self._answered(turn, end))
            return
        worker = self.scene.worker(turn.decode)
        del self._batches[turn.decode][turn.number]
        turn.tpot_ms = (end - turn.first_ms) / turn.request_case.max_tokens
        local = turn.placed.mode is Mode.LOCAL
        tokens = turn.request_case.prompt_tokens if local else 0
        assert turn.request_case.note is not None
        self.scene.estimates.observe_answer(
            turn.request_case.note,
            worker,
            computed_tokens=turn.computed,
            ttft_ms=turn.first_ms - turn.placed_ms,
            tpot_ms=turn.tpot_ms,
            now_ms=self.scene.now_ms,
        )
        self.scene.fleet.release(worker.life, Role.DECODE, tokens)
        self.answered_turns.append(turn)
        self._pump()

    # What came of it

    def later(self, first: int = 0, last: int | None = None) -> list[SimulatedTurn]:
        """Later turns in order of placement."""
        return [t for t in self.placed if t.later][first:last]

    def local_share(self, first: int = 0, last: int | None = None) -> float:
        """Of later turns."""
        return mean(t.placed.mode is Mode.LOCAL for t in self.later(first, last))

    def means(self, first: int = 0, last: int | None = None) -> tuple[float, float]:
        """TTFT of later turns and TPOT of all that were placed meanwhile."""
        turns = self.later(first, last)
        numbers = {t.number for t in turns}
        span = [t for t in self.placed if min(numbers) <= t.number <= max(numbers)]
        return mean(t.ttft_ms for t in turns), mean(t.tpot_ms for t in span)

    def explored(self) -> int:
        """Placements that were made to learn from them."""
        return sum(t.placed.reason is Reason.EXPLORING for t in self.placed)


def simulated(laws: Laws, *, seed: int = 1, **settings: Any) -> QueueSimulation:
    """Two prefill and two decode workers with room for everything."""
    return QueueSimulation(pair(2, 2, window=200, **settings), laws, seed)

"""A fleet and requests for tests of placement: no router, no events."""

from dataclasses import replace
from typing import Any

from schemas.prefix import chain, pack
from schemas.records import (
    Capability,
    KvEvents,
    MemberKind,
    Orchestration,
    Reason,
    Registration,
    Role,
    Sampling,
    Session,
)
from schemas.rules.tokens import pack_tokens
from streams.config import RouterSettings
from streams.core.fleet.workers import Fleet, ModelPools, Worker
from streams.core.placement.estimates import Estimates
from streams.core.placement.placer import Placer
from streams.core.placement.ppd_table import PpdTable
from streams.core.requests.live import Placement, RequestCase
from tests.streams import builders
from tests.streams.builders import ROUTER, T0

BLOCK = 16
ALL = (Orchestration.PREFILL_FIRST, Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)


def capability(**changes: Any) -> Capability:
    values = {
        "model": "tiny",
        "engine": "sim",
        "engine_id": "e",
        "block_size": BLOCK,
        "max_model_len": 100_000,
        "running_max": 64,
        "kv_layout": "x",
        "orchestrations": ALL,
    }
    return Capability(**{**values, **changes})


class PlacerFixture:
    """A placer with a fleet whose members beat when the test says so."""

    def __init__(self, *, table: PpdTable | None = None, **settings: Any) -> None:
        self.settings = RouterSettings(**settings)
        self.placer = Placer(self.settings, table)
        self.fleet = Fleet(ROUTER)
        self.now_ms = T0
        self._beats = 0
        self._windows: dict[str, tuple[Role, int]] = {}

    @property
    def estimates(self) -> Estimates:
        return self.placer.open_estimates("tiny")

    @property
    def pools(self) -> ModelPools:
        return self.fleet.of("tiny")

    def workers(self, role: Role, *ids: str, window: int = 8, **changes: Any) -> None:
        """Workers of one role join."""
        for worker_id in ids:
            able = capability(**changes)
            record = builders.registration(
                worker_id, role, partition=len(self._windows), capability=able
            )
            self._windows[worker_id] = role, window
            self.apply(record)
        self.beat()

    def beat(self, **windows: int) -> None:
        """Everybody beats, with credits as before but for those named; -1: not this one."""
        self._beats += 1
        for worker_id, (role, window) in list(self._windows.items()):
            window = windows.get(worker_id, window)
            self._windows[worker_id] = role, window
            if window >= 0:
                self.apply(builders.beat(worker_id, self._beats, {role: window}))

    def apply(self, record: Any) -> None:
        """The fleet topic has one more record."""
        self.fleet.apply(record, self._beats, self.now_ms)

    def pass_ms(self, passed_ms: int) -> None:
        """Time passes, with a beat at its end."""
        self.now_ms += passed_ms
        self.apply(Registration(member_id=ROUTER, epoch=1, kind=MemberKind.ROUTER, started_ms=T0))
        self.beat()

    def worker(self, worker_id: str) -> Worker:
        worker = self.fleet.worker(worker_id, self._windows[worker_id][0])
        assert worker is not None
        return worker

    def holds(self, worker_id: str, seq: int, tokens: range, **changes: Any) -> None:
        """A worker's cache holds a prompt."""
        stored = pack(chain(tokens, BLOCK))
        values = {"epoch": 1, "at_ms": T0, "block_size": BLOCK, "snapshot": not seq, **changes}
        self.placer.prefixes.apply(KvEvents(worker_id=worker_id, seq=seq, stored=stored, **values))

    def place(self, case: RequestCase) -> Placement | None:
        return self.placer.place(case, self.fleet, self.now_ms)

    def hand_over(
        self, case: RequestCase, prefill: str = "", decode: str = ""
    ) -> tuple[str, Reason]:
        """The decode worker of a prompt that was placed so, empty while it waits, and why."""
        lives = [(prefill, 1), (decode, 1 if decode else 0)]
        worker, reason = self.placer.handoff(
            case, self.fleet, self.now_ms, prefill=lives[0], decode=lives[1]
        )
        return "" if worker is None else worker.worker_id, reason

    def take(self, case: RequestCase) -> Placement:
        """Place and dispatch: the credits and tokens count."""
        placement = self.place(case)
        assert placement is not None
        if placement.prefill is not None:
            self.fleet.add_request(
                placement.prefill, case.prompt_tokens - placement.prefill_cached_tokens
            )
        elif placement.decode is not None:
            self.fleet.add_request(placement.decode, case.prompt_tokens)
        return placement


def case(tokens: int | range = 100, session: Session | None = None, **changes: Any) -> RequestCase:
    """A request of so many tokens."""
    values = {"deadline_ms": T0 + 600_000, **changes}
    now = {name: values.pop(name) for name in ("waiting", "before_decode") if name in values}
    sampling = Sampling(max_tokens=values.pop("max_tokens", 100))
    prompt = pack_tokens(range(tokens) if isinstance(tokens, int) else tokens)
    request = builders.request(prompt_tokens=prompt, sampling=sampling, **values)
    return replace(RequestCase.from_request(request), session=session, **{"waiting": 1, **now})


def session(worker_id: str = "d0", context_tokens: int = 1_000, epoch: int = 1) -> Session:
    """A session whose last turn was decoded there."""
    return Session(
        session_id="s",
        decode_worker=worker_id,
        worker_epoch=epoch,
        context_tokens=context_tokens,
        turns=1,
        last_used_ms=T0,
    )


def pair(prefills: int = 1, decodes: int = 1, *, window: int = 8, **settings: Any) -> PlacerFixture:
    """Prefill workers p0.. and decode workers d0.."""
    scene = PlacerFixture(**settings)
    scene.workers(Role.PREFILL, *(f"p{n}" for n in range(prefills)), window=window)
    scene.workers(Role.DECODE, *(f"d{n}" for n in range(decodes)), window=window)
    return scene

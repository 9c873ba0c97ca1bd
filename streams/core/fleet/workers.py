"""One role's workers as columns, so that a choice among hundreds is a few array operations.

`streams/core/fleet/members.py` keeps the columns equal to its workers;
`streams/core/placement/selection.py` reads them. Rows are in order of worker ids.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from schemas.fleet import CLOCK_MARGIN_MS, LEASE_MS, Member
from schemas.records import Candidate, Capability, MemberState, Role

Life = tuple[str, int]  # worker id and epoch
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
NOT_LISTED = -1
_NEVER_MS = -(1 << 60)
_READY = MemberState.READY  # looked up once: naming a member costs more than comparing with it


@dataclass(slots=True, eq=False)
class Worker:
    """One worker in one role, with what this router has on it."""

    worker_id: str
    epoch: int
    role: Role
    topic: str
    partition: int
    member: Member
    window: int = 0  # granted: most requests of this router at once
    running: int = 0  # requests of this router
    work_ahead_tokens: int = 0  # prompt tokens of this router that are not computed yet
    others_running: int = 0  # requests of other routers, as of the last heartbeat
    others_tokens: int = 0
    paused: bool = False  # it refused work; no more until its next heartbeat
    busy_until_ms: float = 0.0  # when the prompts dispatched to it are expected to be computed
    append_ms_per_token: float = 0.0  # expected there, as of the last prompt that it got
    pace: float = 1.0  # its time for the same work, measured, over its pool's
    appended_tokens: float = 0.0  # prompt tokens placed on it beside its batch, in all
    token_rate: float = 0.0  # prompt tokens placed on it per ms, averaged, as of `given_ms`
    prompt_rate: float = 0.0  # prompts, likewise
    given_ms: int = 0
    taken: int = 0  # number of the last request that it was given, of all that this router gave
    row: int = NOT_LISTED  # its place in the pool's columns
    life: Life = field(init=False)
    as_candidate: Candidate | None = None  # that was not chosen; none since its counts changed

    def __post_init__(self) -> None:
        self.life = self.worker_id, self.epoch

    @property
    def capability(self) -> Capability | None:
        return self.member.registration.capability

    @property
    def free(self) -> int:
        """How many more requests it takes from this router, should it live."""
        return 0 if self.paused else max(0, self.window - self.running)

    def keeps_time_with(self, other: Member) -> bool:
        """Whether the two clocks agree well enough to move KV between them."""
        return abs(self.member.ahead_ms - other.ahead_ms) <= CLOCK_MARGIN_MS

    def lives(self, now_ms: int) -> bool:
        """Ready, and heard of within its lease."""
        member = self.member
        return now_ms - member.seen_ms <= LEASE_MS and member.state is _READY

    def credits(self, now_ms: int) -> int:
        """How many more requests it takes from this router now."""
        return self.free if self.lives(now_ms) else 0


class Pool:
    """The workers of one role; columns of equal length, one row per worker."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.workers = sorted(workers, key=lambda worker: worker.worker_id)
        rows = len(self.workers)
        self.seen_ms = np.full(rows, _NEVER_MS, np.int64)  # when last heard of, if it is ready
        self.free = [0] * rows  # credits, should it live
        self.requests = np.zeros(rows)  # held, of all routers
        self.tokens = np.zeros(rows)  # of prompts that are not computed yet, of all routers
        self.others_tokens = np.zeros(rows)  # those of other routers
        self.busy_until_ms = np.zeros(rows)
        self.pace = np.ones(rows)
        self.taken = np.zeros(rows)  # number of the last request that a row was given
        # Of the rows that live, as of the last call of `living`:
        self.living_count = self.living_credits = 0
        self.living_requests = 0.0
        self._living: Flags = np.zeros(rows, np.bool_)
        self._open: Flags = np.zeros(rows, np.bool_)
        self._living_from_ms = self._living_until_ms = 0  # when these flags hold; never at first
        # As of a version of the prefix index: slots of rows, all as a mask, and rows of masks.
        self.slots: Rows = np.zeros(rows, np.int64)
        self.slots_mask = 0
        self.rows_of: dict[int, Flags] = {}
        self.slots_version = -1
        for row, worker in enumerate(self.workers):
            worker.row = row
            self.update(worker)

    def update(self, worker: Worker) -> None:
        """Bring a worker's row up to date."""
        row = worker.row
        if row == NOT_LISTED:
            return
        ready = worker.member.state is _READY
        self.seen_ms[row] = worker.member.seen_ms if ready else _NEVER_MS
        if ready != self._living[row]:
            self._living_until_ms = 0
        self.others_tokens[row] = worker.others_tokens
        self.busy_until_ms[row] = worker.busy_until_ms
        self.pace[row] = worker.pace
        self.count(worker)

    def count(self, worker: Worker) -> None:
        """Bring up to date what changes with each request that comes or goes."""
        row, worker.as_candidate = worker.row, None
        if row == NOT_LISTED:
            return
        free = worker.free
        requests = float(worker.running + worker.others_running)
        if self._living[row]:
            self.living_credits += free - self.free[row]
            self.living_requests += requests - self.requests.item(row)
            self._open[row] = free > 0
        self.free[row] = free
        self.requests[row], self.taken[row] = requests, worker.taken
        self.tokens[row] = worker.work_ahead_tokens + worker.others_tokens

    def living(self, now_ms: int) -> Flags:
        """Which rows are ready and were heard of within their lease; not to be written to.

        Until the first of them falls silent, the answer is that of the last time.
        """
        if not self._living_from_ms <= now_ms < self._living_until_ms:
            self._living = self.seen_ms >= now_ms - LEASE_MS
            self.living_count = int(np.count_nonzero(self._living))
            self._living_from_ms, self._living_until_ms = now_ms, now_ms + LEASE_MS
            free = np.array(self.free, np.int64)
            self.living_credits = int(free @ self._living)
            self.living_requests = float(self.requests @ self._living)
            self._open = (free > 0) & self._living
            if self.living_count:
                self._living_until_ms = int(self.seen_ms[self._living].min()) + LEASE_MS + 1
        return self._living

    def any_lives(self, now_ms: int) -> bool:
        """Whether some row is ready and was heard of within its lease."""
        self.living(now_ms)
        return self.living_count > 0

    def open(self, now_ms: int) -> Flags:
        """Which rows take one more request; not to be written to."""
        self.living(now_ms)
        return self._open

    def credits(self, now_ms: int) -> int:
        """Credits of all rows that live."""
        self.living(now_ms)
        return self.living_credits

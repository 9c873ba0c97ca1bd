"""A worker in one role with its active answers, and the pool of workers of a role; both as columns.

`streams/core/fleet/members.py` keeps the columns equal to its workers; `streams/core/placement`
reads them. Rows are in order of worker ids.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.fleet import CLOCK_MARGIN_MS, LEASE_MS, Member
from schemas.records import Capability, MemberState, Role

Life = tuple[str, int]  # worker id and epoch
Gateway = tuple[str, int]  # a gateway process: its member id and `started_ms`
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
NOT_LISTED = -1
DECODERS = (Role.DECODE, Role.REPLICA)  # a worker with one of these roles ends the request
_NEVER_MS = -(1 << 60)
_ANSWERS_MIN = 8  # rows of a worker


class ActiveAnswer(NamedTuple):
    """An answer that a worker generates for this router."""

    request_id: str
    prompt_tokens: int
    max_tokens: int  # still to generate when it was dispatched
    deadline_ms: int
    begins_ms: int  # when its first token is expected there


class ActiveAnswers:
    """The active answers of a decode or replica worker, one row for each.

    Each placement computes which of a worker's answers would miss their deadlines; a loop over
    them took a third of a router's CPU at 256 streams. When a row is removed, the last row takes
    its place.
    """

    def __init__(self) -> None:
        self._answers: list[ActiveAnswer] = []
        self._rows: dict[str, int] = {}  # by request id
        self._columns = np.zeros((3, _ANSWERS_MIN))

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: ActiveAnswer) -> None:
        """Add the answer of a request that has none here."""
        row = len(self._answers)
        if row == self._columns.shape[1]:
            self._columns = np.hstack((self._columns, np.zeros_like(self._columns)))
        self._columns[:, row] = answer.max_tokens, answer.deadline_ms, answer.begins_ms
        self._answers.append(answer)
        self._rows[answer.request_id] = row

    def remove(self, request_id: str) -> ActiveAnswer | None:
        """Remove and return the request's answer, if it has one."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return None
        answer, last = self._answers[row], self._answers.pop()
        if last is not answer:
            self._answers[row], self._rows[last.request_id] = last, row
            self._columns[:, row] = self._columns[:, len(self._answers)]
        return answer

    @property
    def max_tokens(self) -> Numbers:
        """Return each answer's tokens still to generate when it was dispatched."""
        return self._column(0)

    @property
    def deadline_ms(self) -> Numbers:
        """Return the deadline of each answer."""
        return self._column(1)

    @property
    def begins_ms(self) -> Numbers:
        """Return when each answer's first token is expected."""
        return self._column(2)

    def _column(self, column: int) -> Numbers:
        values: Numbers = self._columns[column, : len(self._answers)]
        return values


@dataclass(slots=True, eq=False)
class Worker:
    """One worker in one role, with this router's requests on it."""

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
    answers: ActiveAnswers = field(default_factory=ActiveAnswers)  # of this router
    context_tokens: int = 0  # prompt tokens of these answers
    others_context_tokens: int = 0  # KV of other routers' requests, as of the last heartbeat
    capacity_tokens: float = inf  # KV that fits into its memory; inf if unknown
    paused: bool = False  # it refused work; no more until its next heartbeat
    busy_until_ms: float = 0.0  # when the prompts dispatched to it are expected to be computed
    append_ms_per_token: float = 0.0  # expected when it got its last prompt
    pace: float = 1.0  # its measured time for the same work, divided by its pool's
    appended_tokens: float = 0.0  # total prompt tokens placed on it beside its batch
    token_rate: float = 0.0  # prompt tokens placed on it per ms, averaged, as of `rates_at_ms`
    prompt_rate: float = 0.0  # prompts, likewise
    rates_at_ms: int = 0
    last_dispatch: int = 0  # number of its last request, among all that this router dispatched
    row: int = NOT_LISTED  # its place in the pool's columns
    life: Life = field(init=False)

    def __post_init__(self) -> None:
        self.life = self.worker_id, self.epoch

    @property
    def capability(self) -> Capability | None:
        return self.member.registration.capability

    @property
    def requests(self) -> int:
        """Return how many requests it has, of all routers."""
        return self.running + self.others_running

    @property
    def batch_tokens(self) -> int:
        """Return the context tokens that each of its steps reads, of all routers' requests."""
        return self.context_tokens + self.others_context_tokens

    def waiting_ms(self, now_ms: int) -> float:
        """Return how long the prompts dispatched to it are still expected to take, in ms."""
        return max(0.0, self.busy_until_ms - now_ms)

    def waiting_tokens(self, now_ms: int) -> float:
        """Return the tokens of these prompts that it is expected not to have computed yet."""
        per_token_ms = self.append_ms_per_token
        return self.waiting_ms(now_ms) / per_token_ms if per_token_ms else 0.0

    @property
    def free(self) -> int:
        """Return how many more requests it takes from this router, if it lives."""
        return 0 if self.paused else max(0, self.window - self.running)

    def keeps_time_with(self, peer: Member) -> bool:
        """Return whether the two hosts' clocks agree well enough to move KV between them."""
        return abs(self.member.ahead_ms - peer.ahead_ms) <= CLOCK_MARGIN_MS

    def is_alive(self, now_ms: int) -> bool:
        """Return whether it is ready and has reported within its lease."""
        member = self.member
        return now_ms - member.seen_ms <= LEASE_MS and member.state is MemberState.READY


class WorkerPool:
    """The workers of one role; columns of equal length, one row per worker.

    Columns instead of a loop over workers keep a choice among 200 workers within its time limit
    (`make bench-decisions`).
    """

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.workers = sorted(workers, key=lambda worker: worker.worker_id)
        rows = len(self.workers)
        self.seen_ms = np.full(rows, _NEVER_MS, np.int64)  # of the last report, if ready
        self.free = np.zeros(rows, np.int64)  # credits, if it lives
        self.requests = np.zeros(rows)  # of all routers
        self.tokens = np.zeros(rows)  # prompt tokens not computed yet, of all routers
        self.others_tokens = np.zeros(rows)  # likewise, of other routers
        self.batch_tokens = np.zeros(rows)
        self.capacity_tokens = np.full(rows, inf)
        self.busy_until_ms = np.zeros(rows)
        self.pace = np.ones(rows)
        self.last_dispatch = np.zeros(rows)  # number of a row's last request
        self._living: Flags = np.zeros(rows, np.bool_)
        self._living_at_ms: int | None = None  # None if a row has changed since
        for row, worker in enumerate(self.workers):
            worker.row = row
            self.update(worker)

    def update(self, worker: Worker) -> None:
        """Update a worker's row, if it has one."""
        row = worker.row
        if row == NOT_LISTED:
            return
        self._living_at_ms = None
        member = worker.member
        ready = member.state is MemberState.READY
        self.seen_ms[row] = member.seen_ms if ready else _NEVER_MS
        self.free[row] = worker.free
        self.requests[row] = worker.requests
        self.tokens[row] = worker.work_ahead_tokens + worker.others_tokens
        self.others_tokens[row] = worker.others_tokens
        self.batch_tokens[row] = worker.batch_tokens
        self.capacity_tokens[row] = worker.capacity_tokens
        self.busy_until_ms[row] = worker.busy_until_ms
        self.pace[row] = worker.pace
        self.last_dispatch[row] = worker.last_dispatch

    def living(self, now_ms: int) -> Flags:
        """Return which rows are ready and have reported within their lease; do not write to it.

        Cached per `now_ms`, because a placement calls it several times (`make bench-decisions`).
        """
        if now_ms != self._living_at_ms:
            self._living = self.seen_ms >= now_ms - LEASE_MS
            self._living_at_ms = now_ms
        return self._living

    def living_count(self, now_ms: int) -> int:
        """Return how many rows are ready and have reported within their lease."""
        return int(np.count_nonzero(self.living(now_ms)))

    def living_requests(self, now_ms: int) -> float:
        """Return the requests of all living rows, of all routers."""
        return float(self.requests @ self.living(now_ms))

    def open(self, now_ms: int) -> Flags:
        """Return which rows take one more request."""
        return (self.free > 0) & self.living(now_ms)

    def waiting_ms(self, now_ms: int) -> Numbers:
        """Return how long each row's prompts are still expected to take, in ms."""
        return np.maximum(self.busy_until_ms - now_ms, 0.0)

    def credits(self, now_ms: int) -> int:
        """Return the credits of all living rows."""
        return int(self.free @ self.living(now_ms))

"""A worker in one role with its answers, and the workers of a role; both as columns.

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
Gateway = tuple[str, int]  # a gateway's process: its member id and `started_ms`
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
NOT_LISTED = -1
DECODERS = (Role.DECODE, Role.REPLICA)  # whoever of these has a request ends it
_NEVER_MS = -(1 << 60)
_ANSWERS_MIN = 8  # rows of a worker


class ActiveAnswer(NamedTuple):
    """One answer that a worker holds for this router."""

    request_id: str
    prompt_tokens: int
    max_tokens: int  # that were still to be said when it came
    deadline_ms: int
    begins_ms: int  # when its first token is expected there


class ActiveAnswers:
    """The answers that a decode or replica worker has to give, one row for each.

    Each placement asks of all answers of a worker which would miss their deadlines; a loop over
    them took a third of a router's CPU at 256 streams. The last row takes the place of one that is
    removed.
    """

    def __init__(self) -> None:
        self._answers: list[ActiveAnswer] = []
        self._rows: dict[str, int] = {}  # by request id
        self._columns = np.zeros((3, _ANSWERS_MIN))

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: ActiveAnswer) -> None:
        """One whose request holds none yet."""
        row = len(self._answers)
        if row == self._columns.shape[1]:
            self._columns = np.hstack((self._columns, np.zeros_like(self._columns)))
        self._columns[:, row] = answer.max_tokens, answer.deadline_ms, answer.begins_ms
        self._answers.append(answer)
        self._rows[answer.request_id] = row

    def remove(self, request_id: str) -> ActiveAnswer | None:
        """The request's, if it holds one."""
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
        """Per answer: tokens that were still to be said when it came."""
        return self._column(0)

    @property
    def deadline_ms(self) -> Numbers:
        """Return the deadline of each answer."""
        return self._column(1)

    @property
    def begins_ms(self) -> Numbers:
        """Per answer: when its first token is expected."""
        return self._column(2)

    def _column(self, column: int) -> Numbers:
        values: Numbers = self._columns[column, : len(self._answers)]
        return values


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
    answers: ActiveAnswers = field(default_factory=ActiveAnswers)  # of this router
    context_tokens: int = 0  # the prompts of these, all together
    others_context_tokens: int = 0  # KV of other routers' requests, as of the last heartbeat
    capacity_tokens: float = inf  # KV that fits into its memory, as far as it tells
    paused: bool = False  # it refused work; no more until its next heartbeat
    busy_until_ms: float = 0.0  # when the prompts dispatched to it are expected to be computed
    append_ms_per_token: float = 0.0  # expected there, as of the last prompt that it got
    pace: float = 1.0  # its time for the same work, measured, over its pool's
    appended_tokens: float = 0.0  # prompt tokens placed on it beside its batch, in all
    token_rate: float = 0.0  # prompt tokens placed on it per ms, averaged, as of `rates_at_ms`
    prompt_rate: float = 0.0  # prompts, likewise
    rates_at_ms: int = 0
    last_dispatch: int = (
        0  # number of the last request that it was given, of all that this router gave
    )
    row: int = NOT_LISTED  # its place in the pool's columns
    life: Life = field(init=False)

    def __post_init__(self) -> None:
        self.life = self.worker_id, self.epoch

    @property
    def capability(self) -> Capability | None:
        return self.member.registration.capability

    @property
    def requests(self) -> int:
        """How many it holds, of all routers."""
        return self.running + self.others_running

    @property
    def batch_tokens(self) -> int:
        """Tokens of context that each of its steps reads, of all routers."""
        return self.context_tokens + self.others_context_tokens

    def waiting_ms(self, now_ms: int) -> float:
        """How long the prompts that were dispatched to it are still expected to take."""
        return max(0.0, self.busy_until_ms - now_ms)

    def waiting_tokens(self, now_ms: int) -> float:
        """Of these prompts, what it is expected not to have computed yet."""
        per_token_ms = self.append_ms_per_token
        return self.waiting_ms(now_ms) / per_token_ms if per_token_ms else 0.0

    @property
    def free(self) -> int:
        """How many more requests it takes from this router, should it live."""
        return 0 if self.paused else max(0, self.window - self.running)

    def keeps_time_with(self, peer: Member) -> bool:
        """Whether the two clocks agree well enough to move KV between them."""
        return abs(self.member.ahead_ms - peer.ahead_ms) <= CLOCK_MARGIN_MS

    def is_alive(self, now_ms: int) -> bool:
        """Return whether it is ready and was heard of within its lease."""
        member = self.member
        return now_ms - member.seen_ms <= LEASE_MS and member.state is MemberState.READY


class WorkerPool:
    """The workers of one role; columns of equal length, one row per worker.

    Columns instead of a loop over workers keep a choice among 200 within its bar
    (`make bench-decisions`).
    """

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.workers = sorted(workers, key=lambda worker: worker.worker_id)
        rows = len(self.workers)
        self.seen_ms = np.full(rows, _NEVER_MS, np.int64)  # when last heard of, if it is ready
        self.free = np.zeros(rows, np.int64)  # credits, should it live
        self.requests = np.zeros(rows)  # held, of all routers
        self.tokens = np.zeros(rows)  # of prompts that are not computed yet, of all routers
        self.others_tokens = np.zeros(rows)  # those of other routers
        self.batch_tokens = np.zeros(rows)
        self.capacity_tokens = np.full(rows, inf)
        self.busy_until_ms = np.zeros(rows)
        self.pace = np.ones(rows)
        self.last_dispatch = np.zeros(rows)  # number of the last request that a row was given
        self._living: Flags = np.zeros(rows, np.bool_)
        self._living_at_ms: int | None = None  # none where a row has changed since
        for row, worker in enumerate(self.workers):
            worker.row = row
            self.update(worker)

    def update(self, worker: Worker) -> None:
        """Bring a worker's row up to date, if it has one."""
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
        """Which rows are ready and were heard of within their lease; not to be written to.

        A placement asks several times (`make bench-decisions`), so the answer is kept meanwhile.
        """
        if now_ms != self._living_at_ms:
            self._living = self.seen_ms >= now_ms - LEASE_MS
            self._living_at_ms = now_ms
        return self._living

    def living_count(self, now_ms: int) -> int:
        """How many rows are ready and were heard of within their lease."""
        return int(np.count_nonzero(self.living(now_ms)))

    def living_requests(self, now_ms: int) -> float:
        """Requests that these hold, of all routers."""
        return float(self.requests @ self.living(now_ms))

    def open(self, now_ms: int) -> Flags:
        """Which rows take one more request."""
        return (self.free > 0) & self.living(now_ms)

    def waiting_ms(self, now_ms: int) -> Numbers:
        """Per row: how long its prompts are still expected to take."""
        return np.maximum(self.busy_until_ms - now_ms, 0.0)

    def credits(self, now_ms: int) -> int:
        """Credits of all rows that live."""
        return int(self.free @ self.living(now_ms))

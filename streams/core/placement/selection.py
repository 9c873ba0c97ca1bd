"""Selects a worker of a pool: the one with the least estimated time before and for this request.

A `View` is a request (its `RequestCase`) among the workers of its model at one moment.
Work that this router has dispatched counts at once, so that requests do not all go to one new
worker between two heartbeats; a worker of unknown pace has its pool's. Of equal workers, the one
whose last dispatch was longest ago gets the request, so that sessions and cached prefixes spread
over idle workers. A worker that must load the request's LoRA adapter first takes longer. All times
are estimates in ms; `streams/core/placement/placer.py` makes a `View` per placement.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from schemas.records import (
    Candidate,
    Reason,
    Role,
    Session,
)
from streams.core.fleet.workers import (
    Flags,
    ModelPools,
    Numbers,
    Worker,
    WorkerPool,
)
from streams.core.placement.estimates import Amount, Estimates
from streams.core.placement.prefixes import NO_SLOT, Levels, PrefixIndex
from streams.core.requests.live import RequestCase

_ROLES_OF_HOME = (Role.DECODE, Role.REPLICA)
_ROLES_OF_LOAD = ((Role.PREFILL, Role.DECODE), (Role.REPLICA,))
_TIE_MS = 1e-9  # per request: too little to decide between workers that are not equal
MARGIN = 1.3  # times an answer's expected time: most answers take no longer
_TRIES_MAX = 4  # workers for which missed deadlines are computed
ADAPTER_MS = 200.0  # assumed time in which a worker loads a LoRA adapter from its disk
REPORTED_AFTER_MS = 1_000  # by then a worker has reported an answer's cached blocks


class View:
    """A request among the workers at one moment."""

    def __init__(
        self,
        case: RequestCase,
        fleet: ModelPools,
        prefixes: PrefixIndex,
        estimates: Estimates,
        now_ms: int,
    ) -> None:
        """Create the view of a request; `fleet` has the workers of its model."""
        self.case = case
        self.fleet = fleet
        self.now_ms = now_ms
        self.adapter = case.request.adapter
        self.estimates = estimates
        self._prefixes, self._speeds = prefixes, estimates.speeds
        self._levels: Levels | None = None
        self._held_at: dict[Worker, int] = {}
        self._prefill_ms: Numbers | None = None
        self.home: Worker | None = None  # the living worker that has the session's KV
        self.away_reason = Reason.FIRST_TURN  # why the request goes elsewhere, if it does
        self._has_reported = False  # whether the index has all blocks of `home`
        if case.session is not None:
            self._find_home(case.session)

    @cached_property
    def load(self) -> float:
        """Return the fleet's load; see the function `load` below."""
        return load(self.fleet, self.now_ms)

    def _find_home(self, session: Session) -> None:
        self.away_reason = Reason.SESSION_WORKER_GONE
        for role in _ROLES_OF_HOME:
            worker = self.fleet.worker(session.decode_worker, role)
            if worker is None:
                continue
            if worker.epoch == session.worker_epoch and worker.is_alive(self.now_ms):
                self.home, self.away_reason = worker, Reason.SESSION_WORKER_FULL
                had_time = self.now_ms - session.last_used_ms >= REPORTED_AFTER_MS
                self._has_reported = had_time and self._prefixes.is_complete_for(worker.life)
                return

    def _history_tokens(self, home: Worker) -> int:
        """Return the leading prompt tokens that `home` had after the session's last turn: whole
        blocks, without the answer's last token, whose KV was never computed."""
        assert self.case.session is not None
        block_size = 1 if home.capability is None else home.capability.block_size
        tokens = min(self.case.session.context_tokens, self.case.prompt_tokens)
        return max(0, tokens - 1) // block_size * block_size

    def home_takes(self, role: Role) -> bool:
        """Return whether the session's worker has this role and takes one more request."""
        home = self.home
        return home is not None and home.role is role and self.takes(home)

    def why_away(self, role: Role) -> Reason:
        """Return why a worker of that role without the session's KV gets the request."""
        return Reason.DEADLINE_NEAR if self.home_takes(role) else self.away_reason

    def cached_tokens(self, worker: Worker | None) -> int:
        """Return the leading prompt tokens that one worker should have cached."""
        if worker is None:
            return 0
        held_tokens = self._held_at.get(worker)
        if held_tokens is None:
            held_tokens = self._prefixes.held_by(worker, self._find_levels())
            if worker is self.home and not self._has_reported:
                held_tokens = max(held_tokens, self._history_tokens(worker))
            warm = self.case.warm
            if warm is not None and warm.life == worker.life:
                held_tokens = max(held_tokens, min(warm.tokens, self.case.prompt_tokens))
            self._held_at[worker] = held_tokens
        return held_tokens

    def _find_levels(self) -> Levels:
        if self._levels is None:
            self._levels = self._prefixes.levels_of(self._chain)
        return self._levels

    def _chain(self, block_size: int) -> Sequence[int]:
        """Return hashes of the prompt, as far as a worker may have it cached. The history on the
        session's worker is known without hashes: there, only other workers need more of them."""
        case, home_slot, history_tokens = self.case, NO_SLOT, 0
        if self.home is not None and case.session is not None and not self._has_reported:
            home_slot = self._prefixes.slot(self.home.life)
            history_tokens = case.session.context_tokens

        def is_held(value: int, tokens: int) -> bool:
            but_for = home_slot if tokens <= history_tokens else NO_SLOT
            return self._prefixes.is_held(value, block_size, but_for)

        return case.chain(block_size, is_held)

    def uncached_tokens(self, worker: Worker | None) -> int:
        """Return the prompt tokens that one worker should lack, whose KV would be moved there."""
        return self.case.prompt_tokens - self.cached_tokens(worker)

    def to_compute_at(self, worker: Worker) -> int:
        """Return the prompt tokens that one worker would compute, as `to_compute`."""
        return max(1, self.case.prompt_tokens - self.cached_tokens(worker))

    def to_compute(self, role: Role) -> Numbers:
        """Return the prompt tokens that each row would compute: at least one, as in engines."""
        pool, prompt_tokens, home = self.fleet.pools[role], self.case.prompt_tokens, self.home
        missing_tokens = np.empty(len(pool.workers))
        missing_tokens.fill(max(1, prompt_tokens))
        for tokens, rows in self._prefixes.rows_holding(pool, self._find_levels()):
            missing_tokens[rows] = max(1, prompt_tokens - tokens)
        for worker in (home, self._warm_in(role)):
            if worker is not None and worker.role is role:
                missing_tokens[worker.row] = self.to_compute_at(worker)
        return missing_tokens

    def _warm_in(self, role: Role) -> Worker | None:
        """Return the listed worker that was ordered to prefill the prompt's beginning, if any."""
        warm = self.case.warm
        return None if warm is None else self.fleet.worker(warm.life[0], role)

    def takes(self, worker: Worker) -> bool:
        """Return whether a living worker takes the request: it has credit, and can load the
        request's adapter."""
        is_able = not self.adapter or worker.can_load(self.adapter)
        return is_able and worker.free > 0 and worker.is_alive(self.now_ms)

    def open(self, role: Role) -> Flags:
        """Return which rows of a pool take the request."""
        pool = self.fleet.pools[role]
        return self._able(pool, pool.open(self.now_ms))

    def living(self, role: Role) -> Flags:
        """Return which rows of a pool live and can load the request's adapter."""
        pool = self.fleet.pools[role]
        return self._able(pool, pool.living(self.now_ms))

    def _able(self, pool: WorkerPool, rows: Flags) -> Flags:
        if self.adapter and pool.workers:
            rows = rows & np.array([worker.can_load(self.adapter) for worker in pool.workers])
        return rows

    def has_living(self, role: Role) -> bool:
        """Return whether a worker of the role lives that can load the request's adapter."""
        return self.fleet.has_living(role, self.now_ms, self.adapter)

    def loading_ms(self, worker: Worker) -> float:
        """Return the time in which a worker loads the request's adapter; 0 if it is loaded. While
        all of the worker's places are taken, another adapter must leave first."""
        capability = worker.capability
        if not self.adapter or self.adapter in worker.adapters or capability is None:
            return 0.0
        full = len(worker.adapters) >= capability.adapters_max
        return ADAPTER_MS * (2 if full else 1)

    def _adapters_ms(self, pool: WorkerPool) -> Numbers | float:
        """Return that time for each row of a pool; 0 for a request without an adapter."""
        if not self.adapter:
            return 0.0
        return np.array([self.loading_ms(worker) for worker in pool.workers])

    def prefill_ms(self) -> Numbers:
        """Return the time until each row of the prefill pool would have computed the prompt."""
        if self._prefill_ms is None:
            pool, speeds = self.fleet.pools[Role.PREFILL], self._speeds
            own_ms = speeds.prefill_ms(self.to_compute(Role.PREFILL), self.case.prompt_tokens)
            ahead_ms = pool.tokens * speeds.prefill_ms_per_token
            base_ms = (pool.requests + 1.0) * speeds.prefill_base_ms
            took_ms = (own_ms + ahead_ms + base_ms) * pool.pace
            self._prefill_ms = took_ms + self._adapters_ms(pool)
        return self._prefill_ms

    def append_ms(self, role: Role) -> Numbers:
        """Return the time until each row of a decode or replica pool would have computed it."""
        pool, speeds = self.fleet.pools[role], self._speeds
        own_ms = speeds.append_ms(self.to_compute(role), self.case.prompt_tokens)
        others_ms = pool.others_tokens * speeds.append_ms_per_token
        took_ms = (speeds.append_base_ms + others_ms + own_ms) * pool.pace
        return pool.waiting_ms(self.now_ms) + took_ms + self._adapters_ms(pool)

    def append_at_ms(self, worker: Worker) -> float:
        """Return the time as in `append_ms`, for one worker."""
        speeds = self._speeds
        own_ms = speeds.append_ms(float(self.to_compute_at(worker)), self.case.prompt_tokens)
        others_ms = worker.others_tokens * speeds.append_ms_per_token
        took_ms = (speeds.append_base_ms + others_ms + own_ms) * worker.pace
        return worker.waiting_ms(self.now_ms) + took_ms + self.loading_ms(worker)

    def _sharing_ms(self, pool: WorkerPool) -> Numbers:
        """Return the time that the requests on each row add to the whole answer."""
        speeds = self._speeds
        token_ms = (
            pool.requests * speeds.sharing_ms + pool.batch_tokens * speeds.context_ms_per_token
        )
        ends_ms = (speeds.step_ms + token_ms) * speeds.answer_tokens  # one answer's time there
        return token_ms * pool.pace * self.case.max_tokens + self._full_share(pool) * ends_ms

    def _full_share(self, pool: WorkerPool) -> Numbers:
        """Return the share of each row's requests that must end before this one's KV fits."""
        tokens = pool.batch_tokens + (self.case.prompt_tokens + self.case.max_tokens)
        over_tokens = np.maximum(tokens - pool.capacity_tokens, 0.0)
        share: Numbers = over_tokens / np.maximum(pool.batch_tokens, 1.0)
        return share

    def prefill(self, among: Flags) -> Worker | None:
        """Return the marked worker that would end prefill soonest."""
        return pick_cheapest(self.fleet.pools[Role.PREFILL], self.prefill_ms(), among)

    @cached_property
    def pair(self) -> tuple[Worker | None, Worker | None]:
        """Return the workers of a remote placement; prefill goes where it ends soonest."""
        prefill = self.prefill(self.open(Role.PREFILL))
        decode = None if prefill is None else self.decode(self.remote_first_ms(prefill))
        return prefill, decode

    def remote_first_ms(self, prefill: Worker) -> float:
        """Return the time to the first token if that prefill worker computes the prompt."""
        return float(self.prefill_ms()[prefill.row]) + self.estimates.hop_ms

    def missed_local(self, worker: Worker) -> float:
        """Return the expected missed deadlines if the worker computes prompt and answer."""
        first_ms, tokens = self.append_at_ms(worker), self.to_compute_at(worker)
        return self._missed(worker, first_ms, tokens)

    def missed_remote(self, decode: Worker, first_ms: float) -> float:
        """Return the same if it only decodes, from a first token that comes after `first_ms`."""
        return self._missed(decode, first_ms, 0)

    def _missed(self, worker: Worker, first_ms: float, append_tokens: int) -> float:
        """Return the expected number of missed deadlines, of this answer and the worker's others.

        The first token comes after `first_ms`; the worker computes `append_tokens` of the prompt
        beside its batch. Deadlines that other answers would miss without this request do not count.
        Prompts that already wait there delay other answers too.
        """
        estimates, case, now_ms = self.estimates, self.case, self.now_ms
        token_ms = estimates.token_ms(worker, now_ms)
        with_ms = estimates.token_ms(worker, now_ms, 1, case.prompt_tokens)
        own_ms = estimates.answer_share * case.max_tokens * with_ms
        own_risk = _late(own_ms, case.request.deadline_ms - now_ms - first_ms)
        left_tokens, left_ms = self._remaining_work(worker, token_ms)
        waiting_ms = estimates.stall_ms(worker.waiting_tokens(now_ms), token_ms)
        stall_ms = waiting_ms + estimates.stall_ms(append_tokens, token_ms)
        without = _late(left_tokens * token_ms + waiting_ms, left_ms)
        other_risks = _late(left_tokens * with_ms + stall_ms, left_ms) - without
        return float(own_risk + other_risks.sum())

    def _remaining_work(self, worker: Worker, token_ms: float) -> tuple[Numbers, Numbers]:
        """Return the remaining tokens of each answer of a worker, and the ms until its deadline.
        Tokens generated so far are estimated from the expected start and the worker's speed."""
        answers = worker.answers
        said_tokens = np.maximum(self.now_ms - answers.begins_ms, 0.0) / max(token_ms, 1e-3)
        left_tokens = self.estimates.answer_share * answers.max_tokens - said_tokens
        left_ms = answers.deadline_ms - np.maximum(answers.begins_ms, self.now_ms)
        return np.maximum(left_tokens, 0.0), left_ms

    def decode(self, first_ms: float) -> Worker | None:
        """Return the session's worker if it takes the request, else the decode worker of least
        cost, or one with fewer missed deadlines. The first token comes after `first_ms`."""
        first = self.home if self.home_takes(Role.DECODE) else None
        if first is not None and not self.missed_remote(first, first_ms):
            return first
        pool = self.fleet.pools[Role.DECODE]
        moving_ms = self.to_compute(Role.DECODE) * self._speeds.transfer_ms_per_token
        cost_ms = self._sharing_ms(pool) + pool.waiting_ms(self.now_ms) + moving_ms
        cost_ms = cost_ms + self._adapters_ms(pool)
        among = self.open(Role.DECODE)
        return _timeliest(
            pool, cost_ms, among, first, lambda worker: self.missed_remote(worker, first_ms)
        )

    def appender(self) -> Worker | None:
        """Return the decode worker where the answer would end soonest if it computes the prompt."""
        return self._alone(Role.DECODE)

    def replica(self) -> Worker | None:
        """Return the session's replica if it takes the request, else the one that ends soonest."""
        return self._alone(Role.REPLICA, self.home if self.home_takes(Role.REPLICA) else None)

    def _alone(self, role: Role, first: Worker | None = None) -> Worker | None:
        """Return the worker where the answer ends soonest if it computes prompt and answer."""
        if first is not None and not self.missed_local(first):
            return first
        pool = self.fleet.pools[role]
        cost_ms = self.append_ms(role) + self._sharing_ms(pool)
        return _timeliest(pool, cost_ms, self.open(role), first, self.missed_local)


def _late(need_ms: Amount, left_ms: Amount) -> Amount:
    """Return the probability that work of `need_ms` is not done within `left_ms`: 0 if `left_ms` is
    at least MARGIN * `need_ms`, 1 if it is below `need_ms`."""
    over_ms = MARGIN * need_ms - left_ms
    share: Amount = np.minimum(np.maximum(over_ms / ((MARGIN - 1) * need_ms + 1e-3), 0.0), 1.0)
    return share


def pick_cheapest(pool: WorkerPool, cost_ms: Numbers, among: Flags) -> Worker | None:
    """Return the marked worker of least cost."""
    if not pool.workers:
        return None
    cost_ms = cost_ms + pool.last_dispatch * _TIE_MS
    row = int(cost_ms.argmin())
    if not among[row]:
        row = int(np.where(among, cost_ms, np.inf).argmin())
    return pool.workers[row] if among[row] else None


def _timeliest(
    pool: WorkerPool,
    cost_ms: Numbers,
    among: Flags,
    first: Worker | None,
    missed: Callable[[Worker], float],
) -> Worker | None:
    """Return `first`, or else the worker of least cost. If deadlines are missed there, return the
    one of the next cheapest workers that misses the fewest."""
    worker = best = first or pick_cheapest(pool, cost_ms, among)
    if worker is None or not (fewest := missed(worker)):
        return worker
    among = among.copy()
    for _ in range(_TRIES_MAX - 1):
        among[worker.row] = False
        worker = pick_cheapest(pool, cost_ms, among)
        if worker is None or not fewest:
            break
        if (count := missed(worker)) < fewest:
            best, fewest = worker, count
    return best


def load(fleet: ModelPools, now_ms: int) -> float:
    """Return the active requests per living prefill or decode worker of a model, or per replica
    without those.

    The measure of load in plans, and for look-ups in them.
    """
    for roles in _ROLES_OF_LOAD:
        requests, workers = 0.0, 0
        for role in roles:
            pool = fleet.pools[role]
            requests += pool.living_requests(now_ms)
            workers += pool.living_count(now_ms)
        if workers:
            return requests / workers
    return 0.0


def candidates(
    fleet: ModelPools,
    chosen: Mapping[Worker, int],
    roles: Iterable[Role],
    limit: int,
    now_ms: int,
) -> tuple[Candidate, ...]:
    """Return the candidates of a decision, at most `limit`: the chosen workers, with their cached
    tokens of the prompt, then other living workers."""
    picks = [_candidate_of(worker, cached_tokens) for worker, cached_tokens in chosen.items()]
    for worker in chain.from_iterable(fleet.pools[role].workers for role in roles):
        if len(picks) >= limit:
            break
        if worker.is_alive(now_ms) and worker not in chosen:
            picks.append(_candidate_of(worker, 0))
    return tuple(picks[:limit])


def _candidate_of(worker: Worker, cached_tokens: int) -> Candidate:
    return Candidate(
        worker_id=worker.worker_id,
        role=worker.role,
        credits=worker.free,
        running=worker.running,
        work_ahead_tokens=worker.work_ahead_tokens,
        cached_tokens=cached_tokens,
    )

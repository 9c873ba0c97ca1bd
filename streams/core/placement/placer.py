"""Placement: which workers run a request, in which mode and orchestration, and why.

A request goes where its session's KV lies as far as the policy (`policies.py`) allows; a first turn
goes to a replica or to a pair, whichever is expected to answer first. `selection.py` has workers.
"""

from collections.abc import Iterable

from schemas.errors import ConfigError
from schemas.frozen import frozen, maker
from schemas.records import Estimate, Mode, Orchestration, Priority, Reason, Role
from streams.config import RouterSettings
from streams.core.fleet.members import Fleet
from streams.core.fleet.workers import NOT_LISTED, Life, Worker
from streams.core.placement import orchestration, wishes
from streams.core.placement.case import UNTICKETED, Need
from streams.core.placement.estimates import Estimates
from streams.core.placement.orchestration import Way
from streams.core.placement.policies import (
    Case,
    Choice,
    Conditional,
    Learned,
    Policy,
    Static,
    Tabled,
)
from streams.core.placement.ppd_table import Table
from streams.core.placement.prefixes import PrefixIndex
from streams.core.placement.selection import View
from streams.core.placement.wishes import ALL_MET, Missed


@frozen
class Placement:
    """A chosen way to run a request; `decode` is absent while no decode worker has credit."""

    policy: str
    mode: Mode
    reason: Reason
    prefill: Worker | None = None
    decode: Worker | None = None
    orchestration: Orchestration = Orchestration.NONE
    w_ttft: float = 0.0
    w_tpot: float = 0.0
    load: float = 0.0
    estimate: Estimate | None = None
    prefill_cached_tokens: int = 0  # that the chosen workers are thought to hold
    decode_cached_tokens: int = 0
    missed: Missed = ALL_MET
    policy_reason: Reason = Reason.UNKNOWN

    @property
    def chosen(self) -> dict[Worker, int]:
        """The chosen workers, each with what it is thought to hold of the prompt, in tokens."""
        found = {}
        if self.prefill is not None:
            found[self.prefill] = self.prefill_cached_tokens
        if self.decode is not None:
            found[self.decode] = self.decode_cached_tokens
        return found


_case, _placement = maker(Case), maker(Placement)  # one of each per placement
# Looked up once: naming a member of an enumeration costs more than comparing with it.
_PREFILL, _DECODE, _REPLICA = Role.PREFILL, Role.DECODE, Role.REPLICA
_ON_REPLICA, _IN_PLACE, _NO_PAIR = Mode.REPLICA, Mode.LOCAL, Way(Orchestration.NONE)


class Placer:
    """Places requests, and learns from how they went."""

    def __init__(self, settings: RouterSettings, table: Table | None = None) -> None:
        """`table` is needed for the policy of that name; raises ConfigError where it is absent."""
        self.settings = settings
        self.prefixes = PrefixIndex(settings.prefix_blocks_max)
        self.estimates = Estimates(settings)
        self._policies = _policies(settings, table)
        self._weights = {priority: settings.weights(priority) for priority in Priority}
        self._tickets = 0

    def place(self, need: Need, fleet: Fleet, now_ms: int) -> Placement | None:
        """How to run the request now; None while it has to wait.

        What is returned counts as dispatched. Where the policy that the request wishes would have
        to wait, the deployment's places it.
        """
        view = self._view(need, fleet, now_ms)
        wish, default = need.request.policy, self.settings.policy
        if wish and wish != default and wish in self._policies:
            need.policy = wish
            if (found := self._by_policy(need, view)) is not None:
                return found
        need.policy = default
        return self._by_policy(need, view)

    def _by_policy(self, need: Need, view: View) -> Placement | None:
        fleet, now_ms, home = view.fleet, view.now_ms, view.home
        if need.policy == "replica" or not fleet.any_lives(_DECODE, now_ms):
            return self._replica(need, view)
        if view.home_takes(_REPLICA):
            return self._replica(need, view)
        if not fleet.any_lives(_PREFILL, now_ms):
            return self._without_prefill(need, view)
        if home is None or home.role is _REPLICA:
            return self._soonest(need, view)
        choice = self._policies[need.policy].choose(self._case(need, view, home, home))
        takes = view.home_takes(_DECODE)
        if choice.local and takes:
            return self._local(need, view, home, choice)
        if choice.local:
            choice = choice.overruled(Reason.SESSION_WORKER_FULL, local=False)
        remote = self._remote(need, view, choice)
        if remote is None and takes and need.policy != "static":
            choice = choice.overruled(Reason.PREFILL_QUEUE_LONG, local=True)
            return self._local(need, view, home, choice)
        return remote

    def handoff(self, need: Need, fleet: Fleet, now_ms: int) -> tuple[Worker | None, Reason]:
        """The decode worker for a prompt that a prefill worker has computed, and why.

        A replica where no decode worker lives; None while the request has to wait.
        """
        view = self._view(need, fleet, now_ms)
        if not fleet.any_lives(_DECODE, now_ms):
            return view.replica(), Reason.NO_WORKER
        worker = view.decode()
        if worker is None:
            return None, Reason.NO_WORKER
        if need.note is not None:
            self.estimates.joins(need.note, worker, view.lacking(worker))
        if worker is view.home:
            return worker, Reason.SESSION_WORKER
        if need.session is not None:
            return worker, view.away
        return worker, Reason.PREFIX_CACHED if view.held_at(worker) else Reason.PREFILL_DONE

    def forget(self, gone: Iterable[str]) -> None:
        """Forget what workers hold that are gone for long."""
        for worker_id in gone:
            self.prefixes.forget(worker_id)

    def prefill_done(
        self,
        *,
        need: Need | None = None,
        worker: Life,
        computed_tokens: int,
        cached_tokens: int,
        took_ms: float,
        now_ms: int,
    ) -> None:
        """A prefill worker has computed a prompt. Without the need nothing is learned."""
        if need is not None and need.note is not None:
            self.estimates.prefill_done(need.note, worker, computed_tokens, took_ms)

    def transferred(
        self,
        *,
        prefill: Life,
        decode: Life,
        kv_bytes: int,
        tokens: int,
        took_ms: float,
        now_ms: int,
    ) -> None:
        """KV of so many tokens went over."""
        self.estimates.transferred(tokens, took_ms)

    def finished(
        self,
        *,
        need: Need | None = None,
        mode: Mode,
        orchestration: Orchestration,
        worker: Life,
        computed_tokens: int,
        prompt_tokens: int,
        ttft_ms: float,
        tpot_ms: float,
        running: int,
        now_ms: int,
    ) -> None:
        """A request was answered by a decode or replica worker, with `running` requests beside it;
        `ttft_ms` counts from the placement."""
        if need is not None and need.note is not None:
            self.estimates.finished(
                need.note,
                worker,
                computed_tokens=computed_tokens,
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                running=running,
                now_ms=now_ms,
            )

    def _view(self, need: Need, fleet: Fleet, now_ms: int) -> View:
        if self.estimates.changed:
            for (life, role), pace in self.estimates.changed.items():
                fleet.set_pace(life, role, pace)
            self.estimates.changed.clear()
        return View(need, fleet, self.prefixes, self.estimates.speeds, now_ms)

    def _weights_of(self, need: Need) -> tuple[float, float]:
        if need.weights is None:
            request = need.request
            w_ttft, w_tpot = self._weights[request.priority]
            need.weights = (
                request.w_ttft if request.w_ttft >= 0 else w_ttft,  # below 0: its class's
                request.w_tpot if request.w_tpot >= 0 else w_tpot,
            )
        return need.weights

    def _case(self, need: Need, view: View, local: Worker, decode: Worker | None) -> Case:
        """The question for the policy: on that worker, or decoded there after prefill."""
        if need.ticket == UNTICKETED and view.home is not None:
            self._tickets += 1
            need.ticket = self._tickets
        pool = view.fleet.pools[_PREFILL]
        living = pool.living(view.now_ms)
        prefill = view.prefill(living)
        assert prefill is not None
        waiting = pool.living_requests + max(0, need.waiting - 1)
        w_ttft, w_tpot = self._weights_of(need)
        append_tokens = view.to_compute_at(local)
        prefill_tokens = view.to_compute_at(prefill)
        estimate = None
        if need.policy == "learned":
            estimate = self.estimates.expect(
                home=local,
                prefill=prefill,
                append_tokens=append_tokens,
                prefill_tokens=prefill_tokens,
                moved_tokens=view.lacking(decode),
                max_tokens=need.max_tokens,
                weights=(w_ttft, w_tpot),
                at_home=view.home is not None,
                now_ms=view.now_ms,
            )
        return _case(
            ticket=need.ticket,
            prompt_tokens=need.prompt_tokens,
            context_tokens=0 if need.session is None else need.session.context_tokens,
            append_tokens=append_tokens,
            prefill_tokens=prefill_tokens,
            max_tokens=need.max_tokens,
            prefill_queue=waiting / pool.living_count,
            load=view.load,
            slack_ms=need.request.deadline_ms - view.now_ms,
            w_ttft=w_ttft,
            w_tpot=w_tpot,
            has_home=view.home is not None,
            alone=self._alone(view, local, prefill),
            estimate=estimate,
        )

    def _alone(self, view: View, local: Worker, prefill: Worker) -> bool:
        """Whether a prefill worker could do nothing for the prompt that `local` could not: it is
        the same, or has a batch to slow down as well while nobody holds the history."""
        if view.home is not None:
            return prefill.worker_id == local.worker_id
        decoder = view.fleet.worker(prefill.worker_id, _DECODE)
        return decoder is not None and decoder.row != NOT_LISTED

    def _soonest(self, need: Need, view: View) -> Placement | None:
        """No worker holds the history: a remote pair or a replica, whichever answers first."""
        replica = view.replica()
        if replica is None:
            return self._anywhere(need, view)
        prefill = view.prefill(view.open(_PREFILL))
        if prefill is None or view.prefill_ms()[prefill.row] > view.append_at_ms(replica):
            return self._on_replica(need, view, replica)
        remote = self._remote(need, view, Choice(False, view.away))
        return remote or self._on_replica(need, view, replica)

    def _anywhere(self, need: Need, view: View) -> Placement | None:
        """No worker holds the history: a remote pair, unless the policy is asked and says local."""
        policy = self._policies[need.policy]
        worker = view.appender() if policy.first_turns else None
        if worker is None:
            return self._remote(need, view, Choice(False, view.away))
        choice = policy.choose(self._case(need, view, worker, view.decode()))
        if choice.local:
            return self._local(need, view, worker, choice)
        if choice.estimate is not None:  # it tells why
            choice = choice.overruled(view.away, local=False)
        return self._remote(need, view, choice)

    def _remote(self, need: Need, view: View, choice: Choice) -> Placement | None:
        """Prefill where it ends soonest, decode where the history lies or least runs."""
        pools = view.fleet.pools
        prefill = view.prefill(view.open(_PREFILL))
        decode_credits = pools[_DECODE].credits(view.now_ms)
        if prefill is None or need.underway >= decode_credits + self.settings.handover_ahead:
            return None
        decode = view.decode()
        decode_ahead_tokens = view.held_at(decode) - view.held_at(prefill)
        wish = wishes.orchestration(self.settings, need.request)
        way = orchestration.choose(
            self.settings, wish, need.max_tokens, prefill, decode, decode_ahead_tokens
        )
        return self._placement(need, view, Mode.REMOTE, choice, prefill, decode, way)

    def _local(self, need: Need, view: View, worker: Worker, choice: Choice) -> Placement:
        """The decode worker computes the prompt itself."""
        return self._placement(need, view, _IN_PLACE, choice, None, worker)

    def _without_prefill(self, need: Need, view: View) -> Placement | None:
        """The session's decode worker, if the policy might have chosen it anyway; else a replica;
        else, when no prefill worker has lived for long, any decode worker."""
        if need.policy == "static" or not view.home_takes(_DECODE):
            replica = self._replica(need, view)
            absent_ms = view.fleet.prefill_absent_ms(view.now_ms)
            if replica is not None or absent_ms < self.settings.local_after_ms:
                return replica
        worker = view.decode()
        if worker is None:
            return None
        return self._local(need, view, worker, Choice(True, Reason.NO_WORKER))

    def _replica(self, need: Need, view: View) -> Placement | None:
        """The whole request on the session's replica, or where it ends soonest."""
        worker = view.replica()
        return None if worker is None else self._on_replica(need, view, worker)

    def _on_replica(self, need: Need, view: View, worker: Worker) -> Placement:
        if worker is view.home:
            reason = Reason.SESSION_WORKER
        elif need.session is not None:
            reason = view.away
        elif not view.fleet.any_lives(_DECODE, view.now_ms):
            reason = Reason.ONLY_REPLICAS
        else:
            reason = Reason.PREFIX_CACHED if view.held_at(worker) else Reason.LEAST_WORK
        return self._placement(need, view, Mode.REPLICA, Choice(False, reason), None, worker)

    def _placement(
        self,
        need: Need,
        view: View,
        mode: Mode,
        choice: Choice,
        prefill: Worker | None,
        decode: Worker | None,
        way: Way = _NO_PAIR,
    ) -> Placement:
        now_ms = view.now_ms
        if prefill is not None:
            need.note = self.estimates.remote(
                prefill,
                decode,
                view.to_compute_at(prefill),
                need.max_tokens,
                now_ms,
                view.lacking(decode),
            )
        elif decode is not None:
            until_ms = now_ms + view.append_at_ms(decode)
            tokens = view.to_compute_at(decode)
            need.note = self.estimates.in_place(decode, tokens, need.max_tokens, now_ms)
            token_ms = self.estimates.speeds.append_ms_per_token * decode.pace
            view.fleet.occupy(decode, until_ms, token_ms)
        w_ttft, w_tpot = self._weights_of(need)
        policy = "replica" if mode is _ON_REPLICA else need.policy or self.settings.policy
        return _placement(
            policy=policy,
            mode=mode,
            reason=choice.reason,
            prefill=prefill,
            decode=decode,
            orchestration=way.orchestration,
            w_ttft=w_ttft,
            w_tpot=w_tpot,
            load=view.load,
            estimate=choice.estimate,
            policy_reason=choice.policy_reason,
            prefill_cached_tokens=view.held_at(prefill),
            decode_cached_tokens=view.held_at(decode),
            missed=wishes.missed(
                self.settings, need.request, self._policies, policy=policy, mode=mode, way=way
            ),
        )


def _policies(settings: RouterSettings, table: Table | None) -> dict[str, Policy]:
    """By name; of all that need no table, and of `table` where there is one."""
    found: dict[str, Policy] = {
        "learned": Learned(settings),
        "conditional": Conditional(settings),
        "static": Static(settings),
        "replica": Static(settings),  # which is asked nothing: everything goes to replicas
    }
    if table is not None:
        found["table"] = Tabled(table)
    if settings.policy not in found:
        raise ConfigError(
            "router.table: expected the file of a table for policy table, found none; make one "
            "with `trivium plan ppd`"
        )
    return found

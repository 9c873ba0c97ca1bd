"""Placement: which workers run a request, in which mode and orchestration, and why.

A request goes to the worker with its session's KV if the policy (`policies/`) allows it. A first
turn goes to a replica, a pair, or a decode worker if the policy decides first turns, whichever
should answer first. `selection.py` chooses workers. A remote placement gets an orchestration that
both its workers support. A request may wish a policy and an orchestration; it never waits for its
wish: if that cannot be met now, the deployment's settings place it, and the decision names the wish
and why it is unmet. Called by `streams/core/handlers/dispatch.py`.
"""

from collections.abc import Container
from typing import Final, NamedTuple

from schemas.records import Mode, Orchestration, Priority, Reason, Request, Role, Unmet
from schemas.rules.pairs import common_orders
from streams.config import ORCHESTRATIONS, RouterSettings
from streams.core.fleet.workers import Fleet, Life, Worker
from streams.core.placement.estimates import Estimates
from streams.core.placement.policies.policy import Choice, PlacementTurn, Policy, load_policies
from streams.core.placement.policies.rotation import Pair, WorkerRotation
from streams.core.placement.ppd_table import PpdTable
from streams.core.placement.prefixes import PrefixIndex
from streams.core.placement.selection import View
from streams.core.requests.live import ALL_MET, UNTICKETED, Placement, RequestCase, UnmetWishes

_ORDER = (Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)
_PREFILL_FIRST = Orchestration.PREFILL_FIRST


class OrchestrationChoice(NamedTuple):
    """The orchestration, and why the wish was not met, if so."""

    orchestration: Orchestration
    unmet: Unmet = Unmet.NONE


# Prefills dispatched beyond the free decode credits: decode finds the next prompt ready.
HANDOVER_AHEAD: Final = 4
_NO_PAIR = OrchestrationChoice(Orchestration.NONE)


class Placer:
    """Places each request on workers of its model; learns from phases and outcomes."""

    def __init__(self, settings: RouterSettings, table: PpdTable | None = None) -> None:
        """Create a placer. Raise ConfigError if the policy is `table` and there is no `table`."""
        self.settings = settings
        self.prefixes = PrefixIndex(settings.prefix_blocks_max)
        self._estimates: dict[str, Estimates] = {}  # by model
        self._policies = load_policies(settings, table)
        self._turns = WorkerRotation()
        self._weights = {priority: settings.weights(priority) for priority in Priority}
        self._tickets = 0

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the names of the policies by which it can place a request."""
        return tuple(self._policies)

    def estimates_of(self, model: str) -> Estimates:
        """Return what was learned of a model's workers; nothing before its first placement."""
        return self._estimates.get(model) or Estimates(self.settings)

    def open_estimates(self, model: str) -> Estimates:
        """Return what was learned of a model's workers, to learn more from now on."""
        return self._estimates.setdefault(model, self.estimates_of(model))

    def forget_models(self, but: Container[str]) -> None:
        """Forget what was learned of all models but those."""
        for model in [model for model in self._estimates if model not in but]:
            del self._estimates[model]
        self._turns.forget_models(but)

    def place(self, case: RequestCase, fleet: Fleet, now_ms: int) -> Placement | None:
        """Return how to run the request now; None while it has to wait.

        A returned placement counts as dispatched. If the request would have to wait with the policy
        that it wishes, the deployment's policy places it.
        """
        view = self._view(case, fleet, now_ms)
        wish, default = case.request.policy, self.settings.policy
        if wish and wish != default and wish in self._policies:
            case.policy = wish
            if (placement := self._by_policy(view)) is not None:
                return placement
        case.policy = default
        return self._by_policy(view)

    def _by_policy(self, view: View) -> Placement | None:
        policy, home = self._policies[view.case.policy], view.home
        only_replicas = policy.only_replicas or not view.has_living(Role.DECODE)
        if only_replicas or view.home_takes(Role.REPLICA):
            return self._replica(view)
        if not view.has_living(Role.PREFILL):
            return self._without_prefill(view)
        if policy.in_turn:
            return self._in_turn(view, policy)
        if home is None or home.role is Role.REPLICA:
            return self._soonest(view)
        choice = policy.choose(self._turn(view, home, home))
        choice = self._timely(view, policy, home, choice)
        takes = view.home_takes(Role.DECODE)
        if choice.local and takes:
            return self._local(view, home, choice)
        if choice.local:
            choice = _overruled(choice, Reason.SESSION_WORKER_FULL, local=False)
        remote = self._remote(view, choice)
        if remote is None and takes and not policy.is_fixed:
            choice = _overruled(choice, Reason.PREFILL_QUEUE_LONG, local=True)
            return self._local(view, home, choice)
        return remote

    def computes(self, case: RequestCase, fleet: Fleet, now_ms: int) -> tuple[Worker, int] | None:
        """Return the worker that would probably compute the prompt if it were placed now, and how
        many tokens that worker lacks. Asks no policy, and counts nothing as dispatched."""
        view = self._view(case, fleet, now_ms)
        policy, decodes = self._policy_of(case), view.has_living(Role.DECODE)
        if policy.in_turn and decodes:
            worker = self._turns.pair(view, fixed=policy.fixed_pairs)[0]
            return None if worker is None else (worker, view.uncached_tokens(worker))
        worker = view.replica()
        if view.home_takes(Role.DECODE) and not policy.is_fixed:
            worker = view.home
        elif not policy.only_replicas and decodes:
            prefill = view.prefill(view.open(Role.PREFILL))
            at_home = worker is not None and worker is view.home
            if (
                prefill is not None
                and not at_home
                and (worker is None or view.prefill_ms()[prefill.row] <= view.append_at_ms(worker))
            ):
                worker = prefill
        return None if worker is None else (worker, view.uncached_tokens(worker))

    def handoff(
        self, case: RequestCase, fleet: Fleet, now_ms: int, *, prefill: Life, decode: Life
    ) -> tuple[Worker | None, Reason]:
        """Return the decode worker for a prompt that `prefill` has computed, and why.

        `decode` is the decode worker of the placement, if it had one. Returns a replica if no
        decode worker lives; None while the request has to wait.
        """
        view, policy = self._view(case, fleet, now_ms), self._policy_of(case)
        if not view.has_living(Role.DECODE):
            return view.replica(), Reason.NO_WORKER
        if policy.in_turn:
            fixed = policy.fixed_pairs
            worker = self._turns.handoff(view, fixed=fixed, prefill=prefill, decode=decode)
            if worker is not None and worker.life != decode:
                self._turns.record_turn(view.home, worker)
        else:
            worker = view.decode(0.0)
        if worker is None:
            return None, Reason.NO_WORKER
        if case.note is not None:
            view.estimates.note_decode(case.note, worker, view.uncached_tokens(worker))
        if worker is view.home or case.session is not None:
            at_home = worker is view.home
            return worker, Reason.SESSION_WORKER if at_home else view.why_away(Role.DECODE)
        return worker, Reason.PREFIX_CACHED if view.cached_tokens(worker) else Reason.PREFILL_DONE

    def waits_for_partner(self, case: RequestCase) -> bool:
        """Return whether a computed prompt waits for one decode worker even if others are free."""
        return self._policy_of(case).fixed_pairs

    def _policy_of(self, case: RequestCase) -> Policy:
        """Return the policy that has placed the request, or will."""
        return self._policies[self._name_of_policy(case)]

    def _name_of_policy(self, case: RequestCase) -> str:
        wish = case.request.policy
        return case.policy or (wish if wish in self._policies else self.settings.policy)

    def _view(self, case: RequestCase, fleet: Fleet, now_ms: int) -> View:
        model = case.request.model
        pools, estimates = fleet.of(model), self.open_estimates(model)
        while estimates.changed:
            (life, role), pace = estimates.changed.popitem()
            pools.set_pace(life, role, pace)
        return View(case, pools, self.prefixes, estimates, now_ms)

    def _weights_of(self, case: RequestCase) -> tuple[float, float]:
        if case.weights is None:
            request, (ttft, tpot) = case.request, self._weights[case.request.priority]
            case.weights = (
                request.w_ttft if request.w_ttft >= 0 else ttft,  # below 0: the class's weight
                request.w_tpot if request.w_tpot >= 0 else tpot,
            )
        return case.weights

    def _turn(self, view: View, local: Worker, decode: Worker | None) -> PlacementTurn:
        """Return the policy's input: compute the prompt on `local`, or on a prefill worker?"""
        case = view.case
        if case.ticket == UNTICKETED and view.home is not None:
            self._tickets += 1
            case.ticket = self._tickets
        pool = view.fleet.pools[Role.PREFILL]
        prefill = view.prefill(view.living(Role.PREFILL))
        assert prefill is not None
        waiting = pool.living_requests(view.now_ms) + max(0, case.waiting - 1)
        w_ttft, w_tpot = self._weights_of(case)
        append_tokens = view.to_compute_at(local)
        prefill_tokens = view.to_compute_at(prefill)
        estimate = None
        local_ms, remote_ms = view.append_at_ms(local), view.remote_first_ms(prefill)
        if self._policy_of(case).needs_estimate:
            estimate = view.estimates.expect(
                home=local,
                prefill=prefill,
                append_tokens=append_tokens,
                prefill_tokens=prefill_tokens,
                moved_tokens=view.uncached_tokens(decode),
                prompt_tokens=case.prompt_tokens,
                max_tokens=case.max_tokens,
                weights=(w_ttft, w_tpot),
                now_ms=view.now_ms,
            )
            local_ms, remote_ms = estimate.ttft_local_ms, estimate.ttft_remote_ms
        return PlacementTurn(
            ticket=case.ticket,
            prompt_tokens=case.prompt_tokens,
            context_tokens=0 if case.session is None else case.session.context_tokens,
            append_tokens=append_tokens,
            prefill_tokens=prefill_tokens,
            max_tokens=case.max_tokens,
            prefill_queue=waiting / pool.living_count(view.now_ms),
            load=view.load,
            slack_ms=case.request.deadline_ms - view.now_ms,
            w_ttft=w_ttft,
            w_tpot=w_tpot,
            has_home=view.home is not None,
            alone=self._alone(view, local, prefill),
            local_ms=local_ms,
            remote_ms=remote_ms,
            estimate=estimate,
        )

    def _alone(self, view: View, local: Worker, prefill: Worker) -> bool:
        """Return whether the prefill worker has no advantage over `local`: it is the same worker,
        or no worker has the history and the prefill worker has a batch to slow down too."""
        if view.home is not None:
            return prefill.worker_id == local.worker_id
        return view.fleet.worker(prefill.worker_id, Role.DECODE) is not None

    def _soonest(self, view: View) -> Placement | None:
        """Place without a worker that has the history: on a pair or a replica, whichever answers
        first."""
        replica = view.replica()
        if replica is None:
            return self._anywhere(view)
        prefill = view.prefill(view.open(Role.PREFILL))
        if prefill is None or view.prefill_ms()[prefill.row] > view.append_at_ms(replica):
            return self._on_replica(view, replica)
        remote = self._remote(view, Choice(False, view.away_reason))
        return remote or self._on_replica(view, replica)

    def _anywhere(self, view: View) -> Placement | None:
        """Place without a worker that has the history: on a pair, unless the policy is asked and
        chooses local."""
        case = view.case
        policy = self._policies[case.policy]
        worker = view.appender() if policy.first_turns else None
        if worker is None:
            return self._remote(view, Choice(False, view.away_reason))
        choice = policy.choose(self._turn(view, worker, view.decode(0.0)))
        choice = self._timely(view, policy, worker, choice)
        if choice.local:
            return self._local(view, worker, choice)
        if choice.estimate is not None:  # the decision has the policy's reason
            choice = _overruled(choice, view.away_reason, local=False)
        return self._remote(view, choice)

    def _timely(self, view: View, policy: Policy, local: Worker, choice: Choice) -> Choice:
        """Return the policy's choice, or the opposite if that misses fewer deadlines."""
        if policy.is_fixed:
            return choice
        missed_local = view.missed_local(local) if choice.local else 0
        if choice.local and not missed_local:
            return choice
        prefill, decode = view.pair
        if prefill is None or decode is None:
            return choice
        missed_remote = view.missed_remote(decode, view.remote_first_ms(prefill))
        if choice.local:
            is_late = missed_local > missed_remote
        else:
            is_late = missed_remote > 0 and missed_remote > view.missed_local(local)
        if is_late:
            return _overruled(choice, Reason.DEADLINE_NEAR, local=not choice.local)
        return choice

    def _in_turn(self, view: View, policy: Policy) -> Placement | None:
        """Place on the pair whose turn it is."""
        home = view.home
        pair = self._turns.pair(view, fixed=policy.fixed_pairs)
        at_home = home is not None and pair[1] is home
        choice = Choice(False, Reason.SESSION_WORKER if at_home else view.away_reason)
        placement = self._remote(view, choice, pair)
        if placement is not None:
            self._turns.record_turn(home, *pair)
        return placement

    def _remote(self, view: View, choice: Choice, pair: Pair | None = None) -> Placement | None:
        """Place on `pair`, or prefill where it ends soonest and decode where `View.decode` says."""
        case = view.case
        decode_credits = view.fleet.pools[Role.DECODE].credits(view.now_ms)
        if case.before_decode >= decode_credits + HANDOVER_AHEAD:
            return None
        prefill, decode = pair or view.pair
        if prefill is None:
            return None
        decode_ahead_tokens = view.cached_tokens(decode) - view.cached_tokens(prefill)
        wish = _wished_orchestration(self.settings, case.request)
        way = choose_orchestration(
            self.settings, wish, case.max_tokens, prefill, decode, decode_ahead_tokens
        )
        return self._placement(view, Mode.REMOTE, choice, prefill, decode, way)

    def _local(self, view: View, worker: Worker, choice: Choice) -> Placement:
        """Place on a decode worker that computes the prompt itself."""
        return self._placement(view, Mode.LOCAL, choice, None, worker)

    def _without_prefill(self, view: View) -> Placement | None:
        """Place on the session's decode worker, if the policy could have chosen it; else on a
        replica; else on any decode worker, if no prefill worker has lived for long or can load."""
        case, fleet, now_ms = view.case, view.fleet, view.now_ms
        if self._policies[case.policy].is_fixed or not view.home_takes(Role.DECODE):
            replica = self._replica(view)
            absent_ms, least_ms = fleet.prefill_absent_ms(now_ms), self.settings.local_after_ms
            may_return = not fleet.has_living(Role.PREFILL, now_ms) and absent_ms < least_ms
            if replica is not None or may_return:
                return replica
        worker, choice = view.decode(0.0), Choice(True, Reason.NO_WORKER)
        return None if worker is None else self._local(view, worker, choice)

    def _replica(self, view: View) -> Placement | None:
        """Place on the session's replica, or where the request ends soonest; with round robin on
        the next replica."""
        if not self._deals_replicas(view.case):
            worker = view.replica()
        else:
            worker = self._turns.next_worker(view, Role.REPLICA)
            self._turns.record_turn(view.home, worker)
        return None if worker is None else self._on_replica(view, worker)

    def _deals_replicas(self, case: RequestCase) -> bool:
        policy = self._policy_of(case)
        return policy.in_turn and not policy.fixed_pairs

    def _on_replica(self, view: View, worker: Worker) -> Placement:
        case = view.case
        if worker is view.home:
            reason = Reason.SESSION_WORKER
        elif case.session is not None:
            reason = view.why_away(Role.REPLICA)
        elif not view.has_living(Role.DECODE):
            reason = Reason.ONLY_REPLICAS
        else:
            reason = Reason.PREFIX_CACHED if view.cached_tokens(worker) else Reason.LEAST_WORK
        return self._placement(view, Mode.REPLICA, Choice(False, reason), None, worker)

    def _placement(
        self,
        view: View,
        mode: Mode,
        choice: Choice,
        prefill: Worker | None,
        decode: Worker | None,
        way: OrchestrationChoice = _NO_PAIR,
    ) -> Placement:
        case = view.case
        first_ms = self._dispatched(view, prefill, decode)
        w_ttft, w_tpot = self._weights_of(case)
        by_policy = mode is not Mode.REPLICA or self._deals_replicas(case)
        policy = self._name_of_policy(case) if by_policy else "replica"
        return Placement(
            policy=policy,
            mode=mode,
            reason=choice.reason,
            prefill=prefill,
            decode=decode,
            orchestration=way.orchestration,
            w_ttft=w_ttft,
            w_tpot=w_tpot,
            load=view.load,
            first_ms=first_ms,
            estimate=choice.estimate,
            policy_reason=choice.policy_reason,
            prefill_cached_tokens=view.cached_tokens(prefill),
            decode_cached_tokens=view.cached_tokens(decode),
            unmet_wishes=_unmet_wishes(
                self.settings, case.request, self._policies, policy=policy, mode=mode, way=way
            ),
        )

    def _dispatched(self, view: View, prefill: Worker | None, decode: Worker | None) -> float:
        """Note the load before the request on its workers, and count it there; return the expected
        time to its first token."""
        case, now_ms = view.case, view.now_ms
        if prefill is not None:
            first_ms = view.remote_first_ms(prefill)
            case.note = view.estimates.note_remote(
                prefill,
                decode,
                view.to_compute_at(prefill),
                case.max_tokens,
                now_ms,
                view.uncached_tokens(decode),
                case.prompt_tokens,
            )
            return first_ms
        assert decode is not None
        first_ms, tokens = view.append_at_ms(decode), view.to_compute_at(decode)
        case.note = view.estimates.note_local(
            decode, tokens, case.max_tokens, now_ms, case.prompt_tokens
        )
        token_ms = view.estimates.speeds.append_ms_per_token * decode.pace
        busy_ms = first_ms - view.loading_ms(decode)  # others need not wait for the adapter
        view.fleet.occupy(decode, now_ms + busy_ms, token_ms)
        return first_ms


def choose_orchestration(
    settings: RouterSettings,
    wish: str,
    max_tokens: int,
    prefill: Worker,
    decode: Worker | None,
    decode_ahead_tokens: int,
) -> OrchestrationChoice:
    """Return the wished orchestration, or the next one that both workers support.

    The decode worker has `decode_ahead_tokens` more of the prompt cached than the prefill worker.
    All orchestrations but prefill_first need both workers at once. So prefill_first is used if no
    decode worker has credit, if the answer ends in prefill, and if one worker has both roles.
    """
    orchestration, why = _PREFILL_FIRST, _hindrance(max_tokens, prefill, decode)
    if why is None and decode is not None:
        reuses = decode_ahead_tokens >= settings.reuse_tokens_min
        first = ("decode_first" if reuses else "concurrent") if wish == "auto" else wish
        orchestration, why = _first(first, prefill, decode), Unmet.ENGINES_CANNOT
    return OrchestrationChoice(
        orchestration, Unmet.NONE if wish in ("auto", orchestration) or why is None else why
    )


def _overruled(choice: Choice, reason: Reason, *, local: bool) -> Choice:
    """Return the placer's own choice for `reason`; keep the policy's reason and its estimate."""
    return Choice(local, reason, choice.estimate, choice.reason)


def _hindrance(max_tokens: int, prefill: Worker, decode: Worker | None) -> Unmet | None:
    if decode is None:
        return Unmet.NO_DECODE_ROOM
    if max_tokens == 1:
        return Unmet.ONE_TOKEN
    return Unmet.ONE_WORKER if prefill.worker_id == decode.worker_id else None


def _first(wish: str, prefill: Worker, decode: Worker) -> Orchestration:
    """Return the wished orchestration, or the next one that both support."""
    if wish == _PREFILL_FIRST:
        return _PREFILL_FIRST
    if not decode.keeps_time_with(prefill.member):  # allocated KV blocks expire by both clocks
        return _PREFILL_FIRST
    common = common_orders(prefill.capability, decode.capability)
    for orchestration in _ORDER[_ORDER.index(Orchestration(wish)) :]:
        if orchestration in common:
            return orchestration
    return _PREFILL_FIRST


def _wished_orchestration(settings: RouterSettings, request: Request) -> str:
    """Return the orchestration that the request wishes, or else the deployment's."""
    wish = request.orchestration
    return wish if wish in ORCHESTRATIONS else settings.orchestration


def _unmet_wishes(
    settings: RouterSettings,
    request: Request,
    policies: Container[str],
    *,
    policy: str,
    mode: Mode,
    way: OrchestrationChoice,
) -> UnmetWishes:
    """Compare a placement with its wishes; `policies` are the names that the router has."""
    wished_policy, wished_orchestration, unmet = "", "", Unmet.NONE
    if request.policy and request.policy != policy:
        wished_policy = request.policy
        unmet = Unmet.NO_WORKER if request.policy in policies else Unmet.UNKNOWN_POLICY
    if mode is Mode.REMOTE:
        if way.unmet is not Unmet.NONE:
            wished_orchestration, unmet = _wished_orchestration(settings, request), way.unmet
    elif request.orchestration not in ("", "auto"):
        wished_orchestration, unmet = request.orchestration, Unmet.NOT_REMOTE
    if unmet is Unmet.NONE:
        return ALL_MET
    return UnmetWishes(policy=wished_policy, orchestration=wished_orchestration, unmet=unmet)

"""Checks whether this deployment supports what a call wishes: a policy, an order, a probe trigger.

An unsupported wish is refused with the possible values. The check runs once, before the call is
sent. It counts workers that are only silent, since they may be back. Routers replace what cannot be
met later, or at that moment, and report it on `decisions` (`streams/core/placement/placer.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product

from schemas.errors import InvalidRequest
from schemas.records import Capability, MemberKind, Orchestration, Registration, Role
from schemas.rules.pairs import common_orders
from streams.calls.request.intake import CallIntake
from streams.config import ORCHESTRATIONS, POLICIES, POLICY_ENTRIES

POLICY_HEADER, ORCHESTRATION_HEADER = "x-trivium-policy", "x-trivium-orchestration"
_AUTO = "auto"
_PAIR = (Role.PREFILL, Role.DECODE)
_ALWAYS_THERE = ("every", "sentence", "uncertain")  # of a worker that lists no triggers


def check_wishes(
    servers: Callable[[], Sequence[Registration]], intake: CallIntake, policy: str, order: str
) -> None:
    """Raise InvalidRequest for a wish that the routers, or the workers of the model, cannot meet.

    Without a known worker, nothing is checked. `servers` is not called for a call without wishes.
    """
    probe = None if intake.search is None else intake.search.probe
    trigger = None if probe is None else probe.body.trigger
    order = "" if order == _AUTO else order
    if not (trigger or policy or order):
        return
    members = servers()
    workers = [member for member in members if member.capability is not None]
    if not workers:
        return
    if trigger:
        _check_trigger(trigger, workers)
    if policy:
        param = "trivium.policy" if intake.policy else POLICY_HEADER
        routers = [member for member in members if member.kind is MemberKind.ROUTER]
        _check_policy(policy, param, _roles(workers), routers)
    if order:
        param = "trivium.orchestration" if intake.orchestration else ORCHESTRATION_HEADER
        _check_order(Orchestration(order), param, workers)


def _check_trigger(wish: str, workers: Sequence[Registration]) -> None:
    """Raise InvalidRequest unless every worker that decodes has the trigger: any may get the
    request."""
    decoders = (
        worker.capability for worker in workers if {*worker.roles} & {Role.DECODE, Role.REPLICA}
    )
    of_each = [
        {*capability.triggers} or {*_ALWAYS_THERE}
        for capability in decoders
        if capability is not None
    ]
    if all(wish in triggers for triggers in of_each):
        return
    some = "some do" if any(wish in triggers for triggers in of_each) else "none does"
    why = f"every worker that decodes has to have it installed, and {some}"
    raise _unmet("retrieval.probes.trigger", wish, why, sorted(set.intersection(*of_each)))


def _check_policy(wish: str, param: str, roles: set[Role], routers: Sequence[Registration]) -> None:
    """Raise InvalidRequest for an unavailable policy. A router that lists no policies counts as
    having all."""
    policy_lists = [router.policies or POLICIES for router in routers]
    possible = [
        name
        for name in POLICIES
        if _has_workers(name, roles) and all(name in policies for policies in policy_lists)
    ]
    if wish in possible:
        return
    if not _has_workers(wish, roles):
        why = _lacking(wish, roles)
    elif wish == "table":
        why = "routers have no table; name one as router.table"
    else:
        why = f"not every router knows {wish}"
    raise _unmet(param, wish, why, possible)


def _check_order(wish: Orchestration, param: str, workers: Sequence[Registration]) -> None:
    can = _orders(workers)
    if wish not in can:
        possible = [name for name in ORCHESTRATIONS if name == _AUTO or name in can]
        raise _unmet(param, wish, _hindrance(wish, workers), possible)


def _roles(workers: Sequence[Registration]) -> set[Role]:
    return {role for worker in workers for role in worker.roles}


def _unmet(param: str, wish: str, why: str, possible: Iterable[str]) -> InvalidRequest:
    names = ", ".join(possible)
    return InvalidRequest(
        f"{param}: this deployment can meet {names or 'none'}, found {wish}; {why}", param
    )


def _has_workers(policy: str, roles: set[Role]) -> bool:
    return any(roles.issuperset(some) for some in POLICY_ENTRIES[policy].needs)


def _lacking(policy: str, roles: set[Role]) -> str:
    absent = [role for role in POLICY_ENTRIES[policy].needs[0] if role not in roles]
    return f"{policy} needs a worker for {' and '.join(absent)}, and there is none"


def _orders(workers: Sequence[Registration]) -> set[Orchestration]:
    """Return the orders that some prefill worker and some decode worker support together. A worker
    with both roles is no pair with itself."""
    prefills, decodes = (
        _kinds(worker for worker in workers if role in worker.roles) for role in _PAIR
    )
    if not prefills or not decodes:
        return set()
    orders = {Orchestration.PREFILL_FIRST}
    for (prefill, prefill_ids), (decode, decode_ids) in product(prefills.items(), decodes.items()):
        if len(prefill_ids | decode_ids) > 1:
            orders |= common_orders(prefill, decode)
    return orders


def _kinds(workers: Iterable[Registration]) -> dict[Capability, set[str]]:
    """Group workers by the capabilities that matter to a peer; there are few groups."""
    ids_by_kind: dict[Capability, set[str]] = {}
    for worker in workers:
        if (capability := worker.capability) is not None:
            orders = tuple(capability.orchestrations)
            kind = replace(
                capability, engine_id="", nixl_metadata=b"", triggers=(), orchestrations=orders
            )
            ids_by_kind.setdefault(kind, set()).add(worker.member_id)
    return ids_by_kind


def _hindrance(wish: Orchestration, workers: Sequence[Registration]) -> str:
    roles = _roles(workers)
    for role in _PAIR:
        if role not in roles:
            return f"{wish} needs a worker for prefill and one for decode; there is none for {role}"
    able_ids = [
        {worker.member_id for worker in workers if _lists(worker, role, wish)} for role in _PAIR
    ]
    if all(able_ids) and len(able_ids[0] | able_ids[1]) > 1:
        return f"no two workers that can do {wish} can exchange KV; `trivium status` has them all"
    engines = {worker.capability.engine for worker in workers if worker.capability is not None}
    return f"no two workers of engine {' or '.join(sorted(engines))} can do it as they are set"


def _lists(worker: Registration, role: Role, wish: Orchestration) -> bool:
    capability = worker.capability
    return capability is not None and role in worker.roles and wish in capability.orchestrations

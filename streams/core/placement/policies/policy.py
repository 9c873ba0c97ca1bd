"""What a policy is: it chooses whether a decode worker computes a prompt, or a prefill worker.

Each policy is a small pure class in a module of this folder, and an entry of `POLICY_ENTRIES` in
`streams/config.py`. For a later turn, it chooses about the worker with the turn's history. If no
worker has the history (a first turn, or its worker is lost), only a policy with `first_turns`
chooses, about the decode worker where the answer would end soonest. The placer
(`streams/core/placement/placer.py`) handles the cases without a choice (an absent pool, a full
worker), chooses the workers and makes the turn.
"""

from importlib import import_module
from typing import NamedTuple

from schemas.errors import ConfigError
from schemas.frozen import frozen
from schemas.records import Estimate, Reason
from streams.config import POLICY_ENTRIES, RouterSettings
from streams.core.placement.ppd_table import PpdTable


@frozen
class PlacementTurn:
    """A policy's input: a turn, and the one decode worker that the policy is asked about."""

    ticket: int  # number of the choice on this router, from 1; kept while the request waits
    prompt_tokens: int
    context_tokens: int  # of the session so far
    append_tokens: int  # that the decode worker would compute
    prefill_tokens: int  # that the prefill worker would compute
    max_tokens: int
    prefill_queue: float  # requests on prefill workers and in admission, per prefill worker
    load: float  # `selection.load`
    slack_ms: int
    w_ttft: float
    w_tpot: float
    has_home: bool = True  # a living worker has the history; otherwise there is no ticket
    alone: bool = False  # prefill workers have no advantage over this worker
    local_ms: float = 0.0  # estimated time to its first token
    remote_ms: float = 0.0
    estimate: Estimate | None = None  # if the policy asks for one


class Choice(NamedTuple):
    """A choice of local or remote, its reason, and its estimate, if any."""

    local: bool
    reason: Reason
    estimate: Estimate | None = None
    policy_reason: Reason = Reason.UNKNOWN  # if the placer overruled it


class Policy:
    """A policy as the placer calls it; these values suit one that weighs local against remote."""

    first_turns = False  # also asked about first turns, and later ones whose worker is lost
    needs_estimate = False  # its turns have the learned estimate
    needs_table = False  # only routers with a table have it
    is_fixed = False  # deadlines do not overrule it; where not asked, not local
    only_replicas = False  # never asked: each request runs on a replica
    in_turn = False  # never asked: workers get requests in turn, whatever their load
    fixed_pairs = False  # in turn, and each prefill worker has one decode worker

    def __init__(self, settings: RouterSettings, table: PpdTable | None = None) -> None:
        """Create a policy from the router's settings; `table` is the one that they name."""

    def choose(self, turn: PlacementTurn) -> Choice:
        """Return whether the decode worker computes the prompt, and why. This one never does."""
        return Choice(False, Reason.FIXED_SHARE)


def load_policies(settings: RouterSettings, table: PpdTable | None) -> dict[str, Policy]:
    """Return all policies by name; those that need a table only with one. Raise ConfigError if the
    settings name such a policy and there is no table."""
    policies: dict[str, Policy] = {}
    for name, entry in POLICY_ENTRIES.items():
        module, _, kind = entry.path.partition(":")
        policy: type[Policy] = getattr(import_module(module), kind)
        if table is not None or not policy.needs_table:
            policies[name] = policy(settings, table)
    if settings.policy not in policies:
        raise ConfigError(
            f"router.table: expected the file of a table for policy {settings.policy}, found none; "
            "make one with `trivium plan ppd`"
        )
    return policies

"""Policies `static` and `replica`: the settings alone fix where prompts are computed."""

from schemas.records import Reason
from streams.config import RouterSettings
from streams.core.placement.policies.policy import Choice, PlacementTurn, Policy
from streams.core.placement.ppd_table import PpdTable

_GOLDEN = 0.6180339887498949  # the fractional part of the golden ratio


class StaticPolicy(Policy):
    """A fixed share of turns is local: 0 is plain disaggregation, 1 append-prefill (PPD).

    Tickets times the golden ratio, modulo 1, are a sequence of low discrepancy (Weyl; Kuipers and
    Niederreiter 1974): of any n consecutive choices share * n are local, up to O(log n).
    """

    is_fixed = True

    def __init__(self, settings: RouterSettings, table: PpdTable | None = None) -> None:
        self._share = settings.local_share

    def choose(self, turn: PlacementTurn) -> Choice:
        """Choose by the number of the turn alone."""
        return Choice(turn.ticket * _GOLDEN % 1.0 < self._share, Reason.FIXED_SHARE)


class ReplicaPolicy(Policy):
    """Every request runs on a replica worker, which computes prompt and answer."""

    is_fixed = only_replicas = True

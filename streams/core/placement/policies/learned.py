"""Policy `learned`: by the times that the router learns from its workers' reports."""

from schemas.records import Estimate, Reason
from streams.config import RouterSettings
from streams.core.placement.policies.conditional import ConditionalPolicy
from streams.core.placement.policies.policy import Choice, PlacementTurn, Policy
from streams.core.placement.ppd_table import PpdTable

_SLACK_SHARE = 0.25  # of the slack: the most that the slower alternative may take


class LearnedPolicy(Policy):
    """The score of PPD with a price for moving KV, from estimates learned online; with too few
    samples as `ConditionalPolicy`.

    If no worker has the history, it chooses about the best decode worker, and chooses remote until
    prefill and decode have enough samples. A worker in both roles keeps prompts for which prefill
    workers have no advantage. Of any n choices with a history, at most `explore_share` * n are
    reversed, so that the alternative is measured too: none if the deadline is near or if the
    alternative should take long.
    """

    first_turns = needs_estimate = True

    def __init__(self, settings: RouterSettings, table: PpdTable | None = None) -> None:
        self._settings = settings
        self._fallback = ConditionalPolicy(settings, table)

    def choose(self, turn: PlacementTurn) -> Choice:
        """Choose by the turn's estimate, which must not be None."""
        estimate = turn.estimate
        assert estimate is not None
        if estimate.samples < self._settings.samples_min:
            local, reason = self._assumes(turn), Reason.TOO_LITTLE_KNOWN
        else:
            local = turn.alone or (estimate.score > 0 and self._in_time(turn, estimate))
            reason = Reason.LEARNED
        if self._explores(turn, estimate.ttft_remote_ms if local else estimate.ttft_local_ms):
            local, reason = not local, Reason.EXPLORING
        return Choice(local, reason, estimate)

    def _assumes(self, turn: PlacementTurn) -> bool:
        if turn.alone or not turn.has_home:
            return turn.alone
        return self._fallback.choose(turn).local

    def _in_time(self, turn: PlacementTurn, estimate: Estimate) -> bool:
        """Return whether local is fast enough, so that saving a KV move costs no deadline."""
        late_ms = max(estimate.ttft_remote_ms, _SLACK_SHARE * turn.slack_ms)
        return estimate.ttft_local_ms <= late_ms

    def _explores(self, turn: PlacementTurn, expected_ms: float) -> bool:
        share = self._settings.explore_share
        return (
            turn.has_home
            and int(turn.ticket * share) > int((turn.ticket - 1) * share)
            and turn.slack_ms >= self._settings.explore_slack_ms
            and expected_ms <= _SLACK_SHARE * turn.slack_ms
        )

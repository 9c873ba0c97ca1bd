"""Policy `table`: by the measurements of `trivium plan ppd`."""

from schemas.records import Estimate, Reason
from streams.config import RouterSettings
from streams.core.placement.policies.policy import Choice, PlacementTurn, Policy
from streams.core.placement.ppd_table import PpdTable


class TablePolicy(Policy):
    """PPD, algorithm 1, phase 2: the score of the measured cell that is nearest to the turn."""

    needs_table = True

    def __init__(self, settings: RouterSettings, table: PpdTable | None = None) -> None:
        assert table is not None
        self._table = table

    def choose(self, turn: PlacementTurn) -> Choice:
        """Choose by the cell's score; remote if the table has no cell for this context length."""
        new_tokens = turn.prompt_tokens - turn.context_tokens
        at = self._table.bin_of(turn.context_tokens, new_tokens, turn.max_tokens, turn.load)
        cell = self._table.find(at)
        if cell is None:
            return Choice(False, Reason.TOO_LITTLE_KNOWN)
        estimate = Estimate(
            score=cell.score(turn.w_ttft, turn.w_tpot),
            samples=cell.samples,
            gain_ttft=cell.gain_ttft,
            loss_tpot=cell.loss_tpot,
        )
        return Choice(estimate.score > 0, Reason.TABLE, estimate)

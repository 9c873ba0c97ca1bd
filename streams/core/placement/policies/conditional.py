"""Policy `conditional`: remote for long prompts, while prefill workers start soon."""

from schemas.records import Reason
from streams.config import RouterSettings
from streams.core.placement.policies.policy import Choice, PlacementTurn, Policy
from streams.core.placement.ppd_table import PpdTable


class ConditionalPolicy(Policy):
    """Remote only if the prompt has many tokens to compute, and prefill workers start soon (Dynamo,
    2025) or sooner than the decode worker.

    Tokens that the decode worker has cached do not count, whichever session cached them.
    """

    first_turns = True

    def __init__(self, settings: RouterSettings, table: PpdTable | None = None) -> None:
        self._tokens_max = settings.max_local_prefill_tokens
        self._queue_max = settings.max_prefill_queue

    def choose(self, turn: PlacementTurn) -> Choice:
        """Choose by length first, then by queue."""
        if turn.append_tokens <= self._tokens_max:
            return Choice(True, Reason.BELOW_LENGTH)
        if turn.prefill_queue >= self._queue_max and turn.local_ms <= turn.remote_ms:
            return Choice(True, Reason.PREFILL_QUEUE_LONG)
        return Choice(False, Reason.ABOVE_LENGTH)

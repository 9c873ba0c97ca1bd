"""How many answers would miss their deadlines, of those that a worker holds and one more.

What a router knows of an answer under way is when it was expected to begin and how fast the worker
is. How long it will be is the learned share of `max_tokens`. `streams/core/placement/selection.py`
asks before it chooses a worker.
"""

from streams.core.fleet.workers import Answer, Worker
from streams.core.placement.case import Case
from streams.core.placement.estimates import Estimates

MARGIN = 1.3  # nine of ten answers take at most so many times what is expected


class Deadlines:
    """Asks the estimates; keeps nothing."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def missed(
        self, worker: Worker, case: Case, first_ms: float, append_tokens: int, now_ms: int
    ) -> int:
        """How many, with the request there, whose first token comes after `first_ms`, and of whose
        prompt the worker has to compute so much beside its batch.

        What it could not end in time without the request either does not count.
        """
        estimates = self._estimates
        now_token_ms = estimates.token_ms(worker, now_ms)
        token_ms = estimates.token_ms(worker, now_ms, 1, case.prompt_tokens)
        stall_ms = estimates.stall_ms(append_tokens, now_token_ms)
        tokens = estimates.answer_share * case.max_tokens
        left_ms = case.request.deadline_ms - now_ms - first_ms
        missed = int(MARGIN * tokens * token_ms > left_ms)
        for answer in worker.answers.values():
            tokens, left_ms = self._left(answer, now_token_ms, now_ms)
            if MARGIN * tokens * token_ms + stall_ms > left_ms:
                missed += tokens * now_token_ms <= left_ms
        return missed

    def _left(self, answer: Answer, token_ms: float, now_ms: int) -> tuple[float, float]:
        """How many tokens of it are still to come, and the time for that."""
        said_tokens = max(0, now_ms - answer.begins_ms) / max(token_ms, 1e-3)
        tokens = self._estimates.answer_share * answer.max_tokens - said_tokens
        return max(0.0, tokens), answer.deadline_ms - max(now_ms, answer.begins_ms)

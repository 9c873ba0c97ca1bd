"""The result of placement: how to run a request, on which workers, and why."""

from schemas.frozen import frozen
from schemas.records import Estimate, Mode, Orchestration, Reason
from streams.core.fleet.workers import Worker
from streams.core.placement.case import ALL_MET, UnmetWishes


@frozen
class Placement:
    """How to run a request; `decode` is None while no decode worker has credit."""

    policy: str
    mode: Mode
    reason: Reason
    prefill: Worker | None = None
    decode: Worker | None = None
    orchestration: Orchestration = Orchestration.NONE
    w_ttft: float = 0.0
    w_tpot: float = 0.0
    load: float = 0.0
    first_ms: float = 0.0  # expected time from now to its first token
    estimate: Estimate | None = None
    prefill_cached_tokens: int = 0  # by the prefix index; 0 if unknown
    decode_cached_tokens: int = 0
    unmet_wishes: UnmetWishes = ALL_MET
    policy_reason: Reason = Reason.UNKNOWN

    @property
    def chosen(self) -> dict[Worker, int]:
        """Return the chosen workers, each with its cached tokens of the prompt by the index."""
        tokens_by_worker = {}
        if self.prefill is not None:
            tokens_by_worker[self.prefill] = self.prefill_cached_tokens
        if self.decode is not None:
            tokens_by_worker[self.decode] = self.decode_cached_tokens
        return tokens_by_worker

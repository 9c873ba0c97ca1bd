"""Checks usage: each request has one record, for the outcome that counts, numbered without a gap.

Sums are computed again from the log and from what clients received.
"""

from collections import defaultdict

from infra.simulator.cluster import Checker, Cluster
from schemas.records import (
    Orchestration,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Request,
    Usage,
)

_Step = tuple[int, str, PhaseKind]  # attempt, worker, last phase
_LAST_WORDS = (PhaseKind.PREFILL_DONE, PhaseKind.FAILED)


class UsageChecker(Checker):
    """Compares usage records with the requests, outcomes and phases in the log."""

    def __init__(self) -> None:
        self.usages: dict[str, Usage] = {}
        self._accepted: dict[str, Request] = {}
        self._outcomes: defaultdict[str, dict[int, Outcome]] = defaultdict(dict)  # by attempt
        self._spent_ms: defaultdict[str, dict[_Step, int]] = defaultdict(dict)

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Note requests, outcomes and phases, and check usage."""
        if isinstance(record, Request):
            self._accepted[record.request_id] = record
        elif isinstance(record, Outcome):
            self._outcomes[record.request_id].setdefault(record.attempt, record)
        elif isinstance(record, Phase) and record.kind in _LAST_WORDS:
            step = record.attempt, record.worker_id, record.kind
            spent_ms = record.ended_ms - record.started_ms  # negative if a clock was set back
            self._spent_ms[record.request_id][step] = max(0, spent_ms)
        elif isinstance(record, Usage):
            self._check_usage(record)

    def _check_usage(self, usage: Usage) -> None:
        name = usage.request_id
        assert name in self._accepted, f"{name}: usage of no request"
        assert name not in self.usages, f"{name}: told twice what it has used"
        assert usage.number == len(self.usages), f"{name}: number {usage.number} is none in order"
        outcome = self._outcomes[name].get(usage.attempt)
        assert outcome is not None, f"{name}: told what it has used before its outcome"
        figures = (usage.kind, usage.completion_tokens, usage.prompt_tokens, usage.cached_tokens)
        prompt_tokens = outcome.prompt_tokens + outcome.retrieved_tokens
        expected = (outcome.kind, outcome.completion_tokens, prompt_tokens, outcome.cached_tokens)
        assert figures == expected, f"{name}: told {figures} of an outcome with {expected}"
        self._check_time(usage, outcome)
        self.usages[name] = usage

    def _check_time(self, usage: Usage, outcome: Outcome) -> None:
        """Check that worker time is at most that of all phases, and at least that of the answer."""
        name, spent_ms = usage.request_id, self._spent_ms[usage.request_id]
        min_ms = max_ms = outcome.worker_ms
        if outcome.kind is OutcomeKind.COMPLETED and outcome.decode_worker:
            if outcome.orchestration is Orchestration.PREFILL_FIRST:
                step = outcome.attempt, outcome.prefill_worker, PhaseKind.PREFILL_DONE
                min_ms += spent_ms.get(step, 0)
        max_ms += sum(spent_ms.values())
        assert min_ms <= usage.worker_ms <= max_ms, (
            f"{name}: {usage.worker_ms} ms of {min_ms}..{max_ms}"
        )

    def on_finish(self, cluster: Cluster) -> None:
        """Check that all requests have usage, and that its tokens are those that clients
        received."""
        untold = self._accepted.keys() - self.usages.keys()
        assert not untold, f"never told what they have used: {sorted(untold)}"
        for request in cluster.clients.requests:
            if request.outcome is not None and request.request_id in self.usages:
                usage = self.usages[request.request_id]
                assert usage.kind is request.outcome.kind, f"{request.request_id}: ended otherwise"
        completed_usages = [u for u in self.usages.values() if u.kind is OutcomeKind.COMPLETED]
        for usage in completed_usages:  # also if a router ended the answer
            ends = self._outcomes[usage.request_id].values()
            made_ms = [end.worker_ms for end in ends if end.kind is OutcomeKind.COMPLETED]
            made_ms = [ms for ms in made_ms if ms]
            assert usage.worker_ms >= min(made_ms, default=0.0), (
                f"{usage.request_id}: {usage.worker_ms} ms, without those of its answer: {made_ms}"
            )
        counted = sum(
            request.output_tokens for request in cluster.clients.requests if request.completed
        )
        assert sum(usage.completion_tokens for usage in completed_usages) == counted, (
            "clients count otherwise"
        )

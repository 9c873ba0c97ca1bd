"""Each request tells once what it has used, of the outcome that counts, and its numbers have no
gap. Sums are worked out again from the log and from what clients were told.
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

_Step = tuple[int, str, PhaseKind]  # attempt, worker, what it finished
_LAST_WORDS = (PhaseKind.PREFILL_DONE, PhaseKind.FAILED)


class Used(Checker):
    """Books of requests, outcomes and usage, as they stand in the log."""

    def __init__(self) -> None:
        self.told: dict[str, Usage] = {}
        self._accepted: dict[str, Request] = {}
        self._outcomes: defaultdict[str, dict[int, Outcome]] = defaultdict(dict)  # by attempt
        self._spent_ms: defaultdict[str, dict[_Step, int]] = defaultdict(dict)

    def wrote(self, topic: str, record: object, now_ms: float) -> None:
        """Keep the books."""
        if isinstance(record, Request):
            self._accepted[record.request_id] = record
        elif isinstance(record, Outcome):
            self._outcomes[record.request_id].setdefault(record.attempt, record)
        elif isinstance(record, Phase) and record.kind in _LAST_WORDS:
            step = record.attempt, record.worker_id, record.kind
            spent_ms = record.ended_ms - record.started_ms  # less than none: a clock was set back
            self._spent_ms[record.request_id][step] = max(0, spent_ms)
        elif isinstance(record, Usage):
            self._told(record)

    def _told(self, usage: Usage) -> None:
        name = usage.request_id
        assert name in self._accepted, f"{name}: usage of no request"
        assert name not in self.told, f"{name}: told twice what it has used"
        assert usage.number == len(self.told), f"{name}: number {usage.number} is none in order"
        outcome = self._outcomes[name].get(usage.attempt)
        assert outcome is not None, f"{name}: told what it has used before its outcome"
        found = (usage.kind, usage.completion_tokens, usage.prompt_tokens, usage.cached_tokens)
        prompt_tokens = outcome.prompt_tokens + outcome.retrieved_tokens
        expected = (outcome.kind, outcome.completion_tokens, prompt_tokens, outcome.cached_tokens)
        assert found == expected, f"{name}: told {found} of an outcome with {expected}"
        self._check_time(usage, outcome)
        self.told[name] = usage

    def _check_time(self, usage: Usage, outcome: Outcome) -> None:
        """No more than all workers have told of, and no less than those of the answer had to."""
        name, spent = usage.request_id, self._spent_ms[usage.request_id]
        least = most = outcome.worker_ms
        if outcome.kind is OutcomeKind.COMPLETED and outcome.decode_worker:
            if outcome.orchestration is Orchestration.PREFILL_FIRST:
                step = outcome.attempt, outcome.prefill_worker, PhaseKind.PREFILL_DONE
                least += spent.get(step, 0)
        most += sum(spent.values())
        assert least <= usage.worker_ms <= most, f"{name}: {usage.worker_ms} ms of {least}..{most}"

    def finished(self, cluster: Cluster) -> None:
        """All have told, and what was completed is what clients count."""
        untold = self._accepted.keys() - self.told.keys()
        assert not untold, f"never told what they have used: {sorted(untold)}"
        for served in cluster.clients.served:
            if served.outcome is not None and served.request_id in self.told:
                usage = self.told[served.request_id]
                assert usage.kind is served.outcome.kind, f"{served.request_id}: ended otherwise"
        told = [u for u in self.told.values() if u.kind is OutcomeKind.COMPLETED]
        for usage in told:  # an answer that a router ends was made by a worker
            ends = self._outcomes[usage.request_id].values()
            made_ms = [end.worker_ms for end in ends if end.kind is OutcomeKind.COMPLETED]
            made_ms = [ms for ms in made_ms if ms]
            assert usage.worker_ms >= min(made_ms, default=0.0), (
                f"{usage.request_id}: {usage.worker_ms} ms, without those of its answer: {made_ms}"
            )
        counted = sum(each.output_tokens for each in cluster.clients.served if each.completed)
        assert sum(usage.completion_tokens for usage in told) == counted, "clients count otherwise"

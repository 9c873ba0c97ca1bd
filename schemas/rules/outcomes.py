"""Decides which outcome of a request counts, for all readers of the log.

The outcome of the highest attempt counts. An attempt has one writer: the worker that ends it, or
the router, which ends a request with an attempt number of its own, above all that it placed. So
records alone decide, in any order and after compaction: the key of an outcome has request and
attempt. Gateways apply the same rule: a higher attempt voids lower ones, and nothing follows an
end.
"""

from collections import defaultdict
from collections.abc import Iterable

from schemas.records import Outcome


def outcome_key(outcome: Outcome) -> str:
    """Return the record key: compaction keeps one outcome of each attempt."""
    return f"{outcome.request_id}.{outcome.attempt}"


def counting_outcome(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the counting outcome of a request; None if there are no outcomes."""
    return max(outcomes, key=lambda outcome: outcome.attempt, default=None)


def counting_outcomes(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    """Return the counting outcome of each request that has one, by request id."""
    of_each: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        of_each[outcome.request_id].append(outcome)
    return {
        name: end
        for name, candidates in of_each.items()
        if (end := counting_outcome(candidates)) is not None
    }

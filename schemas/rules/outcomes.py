"""Which outcome of a request counts, for whoever reads the log.

The one of the highest attempt. An attempt has one writer: the worker that ends it, or the router,
which ends a request by an attempt of its own, above all that it placed. So records alone tell, in
any order and after compaction: the key of an outcome names request and attempt. Gateways follow the
same rule as they read: a higher attempt voids lower ones, and nothing follows an end.
"""

from collections import defaultdict
from collections.abc import Iterable

from schemas.records import Outcome


def outcome_key(outcome: Outcome) -> str:
    """The record key: compaction keeps one outcome of each attempt."""
    return f"{outcome.request_id}.{outcome.attempt}"


def counting_outcome(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The one that counts of a request's outcomes; none where there are none."""
    return max(outcomes, key=lambda outcome: outcome.attempt, default=None)


def counting_outcomes(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    """The one that counts of each request that has any, by request id."""
    of_each: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        of_each[outcome.request_id].append(outcome)
    return {
        name: end
        for name, candidates in of_each.items()
        if (end := counting_outcome(candidates)) is not None
    }

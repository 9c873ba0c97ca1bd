"""Compares a shadow router's placements with the live ones, and their outcomes.

If both agree, the live outcome counts for the shadow too. If they differ, the simulator computes
the outcome (`run.py`), with all traffic placed by the shadow's settings. `trivium replay --shadow`
calls it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infra.replay.redeciding import Chosen, PlacementChanges, with_overrides
from infra.replay.simulation.deployment import recorded_deployment
from infra.replay.simulation.figures import figures
from infra.replay.simulation.run import simulate
from infra.replay.simulation.traffic import RecordedTraffic
from schemas.errors import RecordError
from schemas.records import Decision

LIVE, SHADOW = "all, live", "all, with the shadow"
_ORDER = (
    LIVE,
    SHADOW,
    "agree, live",
    "differ, live",
    "differ, simulated as it was",
    "differ, simulated with the shadow",
)


@dataclass(slots=True)
class ShadowComparison:
    """The last placement of each request, compared with the shadow's; sets of request ids."""

    changes: PlacementChanges = field(default_factory=PlacementChanges)
    agreed: set[str] = field(default_factory=set)
    differ: set[str] = field(default_factory=set)


def compare_placements(traffic: RecordedTraffic, shadow: Iterable[Decision]) -> ShadowComparison:
    """Compare placements; raises RecordError if the shadow decided none of them."""
    shadow_decisions = {(decision.request_id, decision.attempt): decision for decision in shadow}
    result = ShadowComparison()
    for request_id, live in traffic.placements.items():
        decision = shadow_decisions.get((request_id, live.attempt))
        if request_id not in traffic.requests:
            continue
        if decision is None:
            result.changes.unseen += 1
        else:
            is_same = result.changes.add(Chosen.of_decision(live), Chosen.of_decision(decision))
            (result.agreed if is_same else result.differ).add(request_id)
    if not result.changes.placements:
        raise RecordError("decisions.shadow: no shadow has decided anything of this span")
    return result


def compare_outcomes(
    traffic: RecordedTraffic, comparison: ShadowComparison, shadow_settings: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return figures of the live requests and of the shadow's; `shadow_settings` are text."""
    by_id = traffic.outcomes
    agreed = [by_id[request_id] for request_id in comparison.agreed if request_id in by_id]
    differ = [by_id[request_id] for request_id in comparison.differ if request_id in by_id]
    rows = {LIVE: figures([*agreed, *differ])}
    simulated = []
    if differ:
        deployment = recorded_deployment(traffic)
        for name, settings in (("as it was", {}), ("with the shadow", shadow_settings)):
            router = with_overrides(deployment.settings, settings)
            served = simulate(replace(deployment, settings=router), traffic).outcomes
            simulated = [
                served[request_id] for request_id in comparison.differ if request_id in served
            ]
            rows[f"differ, simulated {name}"] = figures(simulated)
        rows["differ, live"] = figures(differ)
    rows["agree, live"] = figures(agreed)
    rows[SHADOW] = figures([*agreed, *simulated])
    return {name: rows[name] for name in _ORDER if name in rows}

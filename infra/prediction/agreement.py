"""Compares a shadow router's placements with the live ones, and their outcomes.

If both agree, the live outcome counts for the shadow too. If they differ, the simulator predicts
the outcome (`predictor.py`), with all traffic placed by the shadow's settings. Called by `trivium
compare`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.prediction.figures import figures
from infra.prediction.predictor import predict
from infra.prediction.speeds import measure_speeds
from infra.prediction.traffic import RecordedTraffic
from infra.replay.redeciding import with_overrides
from schemas.errors import RecordError
from schemas.records import Decision, Mode

LIVE, SHADOW = "all, live", "all, with the shadow"


@dataclass(slots=True)
class Agreement:
    """Counts of the last placement of each request, compared with the shadow's."""

    placements: int = 0
    same: int = 0
    modes: Counter[tuple[str, str]] = field(default_factory=Counter)  # live mode, shadow's mode
    workers: int = 0  # same mode, other workers
    orchestrations: int = 0  # same workers, other orchestration
    unseen: int = 0  # requests of the span that the shadow has not placed
    agreed: set[str] = field(default_factory=set)  # request ids
    differ: set[str] = field(default_factory=set)

    @property
    def share(self) -> float:
        """Return the share of the placements that are the same."""
        return self.same / max(1, self.placements)

    def add(self, live: Decision, shadow: Decision) -> None:
        """Count one placement as the same or as different."""
        self.placements += 1
        same = False
        if shadow.mode is not live.mode:
            mode = "wait" if shadow.mode is Mode.NONE else shadow.mode.value
            self.modes[live.mode.value, mode] += 1
        elif _worker_epochs(shadow) != _worker_epochs(live):
            self.workers += 1
        elif shadow.orchestration is not live.orchestration:
            self.orchestrations += 1
        else:
            self.same, same = self.same + 1, True
        (self.agreed if same else self.differ).add(live.request_id)


def _worker_epochs(decision: Decision) -> tuple[tuple[str, int], ...]:
    prefill = decision.prefill_worker, decision.prefill_epoch
    return prefill, (decision.decode_worker, decision.decode_epoch)


def agreement(traffic: RecordedTraffic, shadow: Iterable[Decision]) -> Agreement:
    """Compare placements; raises RecordError if the shadow decided none of them."""
    shadow_decisions = {(decision.request_id, decision.attempt): decision for decision in shadow}
    result = Agreement()
    for request_id, live in traffic.placements.items():
        decision = shadow_decisions.get((request_id, live.attempt))
        if request_id not in traffic.requests:
            continue
        if decision is None:
            result.unseen += 1
        else:
            result.add(live, decision)
    if not result.placements:
        raise RecordError("decisions.shadow: no shadow has decided anything of this span")
    return result


def outcomes(
    traffic: RecordedTraffic, agreement: Agreement, shadow_settings: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return figures of the live requests and of the shadow's; `shadow_settings` are text."""
    by_id = traffic.outcomes
    agreed = [by_id[request_id] for request_id in agreement.agreed if request_id in by_id]
    differ = [by_id[request_id] for request_id in agreement.differ if request_id in by_id]
    rows = {LIVE: figures([*agreed, *differ])}
    predicted = []
    if differ:
        speeds = measure_speeds(traffic)
        for name, settings in (("as it was", {}), ("with the shadow", shadow_settings)):
            served = predict(traffic, speeds, with_overrides(traffic.settings, settings)).outcomes
            predicted = [
                served[request_id] for request_id in agreement.differ if request_id in served
            ]
            rows[f"differ, simulated {name}"] = figures(predicted)
        rows["differ, live"] = figures(differ)
    rows["agree, live"] = figures(agreed)
    rows[SHADOW] = figures([*agreed, *predicted])
    return {name: rows[name] for name in _ORDER if name in rows}


_ORDER = (
    LIVE,
    SHADOW,
    "agree, live",
    "differ, live",
    "differ, simulated as it was",
    "differ, simulated with the shadow",
)

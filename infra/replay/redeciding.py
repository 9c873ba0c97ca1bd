"""Finds what other settings would have changed: asks a second placer for every placement.

The replayed router decides as it did, so each question comes with the fleet, queues, caches and
learned speeds of that moment. The second placer uses the same knowledge, decides, and changes
nothing. What its placements would have led to later is therefore not in the answer. Called by
`trivium replay`.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, NamedTuple

from schemas.errors import ConfigError
from schemas.records import Decision, Estimate, Mode, Orchestration
from schemas.sections import build
from streams.agents.router import load_table
from streams.config import RouterSettings
from streams.core.fleet.workers import Fleet, Worker
from streams.core.placement.estimates import Estimates
from streams.core.placement.placer import Placer
from streams.core.placement.ppd_table import PpdTable
from streams.core.placement.selection import View
from streams.core.requests.live import Placement, RequestCase
from streams.core.router import Router

# Settings that affect a placement, but nothing that was learned or queued before it.
SETTABLE = frozenset(
    {
        *("policy", "table", "local_share", "max_local_prefill_tokens", "max_prefill_queue"),
        *("w_ttft", "w_tpot", "weights_interactive", "weights_standard", "weights_batch"),
        *("explore_share", "explore_slack_ms", "orchestration", "reuse_tokens_min"),
        "local_after_ms",
    }
)


class ShadowPlacer(Placer):
    """A placer that shares the knowledge of the real one and dispatches nothing."""

    def __init__(self, settings: RouterSettings, table: PpdTable | None, placer: Placer) -> None:
        super().__init__(settings, table)
        self.prefixes = placer.prefixes
        self._real_placer = placer

    def open_estimates(self, model: str) -> Estimates:
        """Return what the real placer has learned of the model's workers."""
        return self._real_placer.open_estimates(model)

    def would_place(self, case: RequestCase, fleet: Fleet, now_ms: int) -> Placement | None:
        """Return how it would run the request now, or None if it would let the request wait."""
        return self.place(copy(case), fleet, now_ms)

    def _dispatched(self, view: View, prefill: Worker | None, decode: Worker | None) -> float:
        """Return 0: nothing is dispatched, so no first token comes."""
        return 0.0


class Chosen(NamedTuple):
    """The place where a request runs; without a mode, it waits."""

    mode: Mode
    workers: tuple[tuple[str, int], ...]  # ids and epochs for prefill and decode
    orchestration: Orchestration
    estimate: Estimate | None

    @classmethod
    def of_placement(cls, placement: Placement | None) -> "Chosen":
        """Return the choice of a placer."""
        if placement is None:
            return cls(Mode.NONE, (), Orchestration.NONE, None)
        pair = placement.prefill, placement.decode
        workers = tuple(("", 0) if worker is None else worker.life for worker in pair)
        return cls(placement.mode, workers, placement.orchestration, placement.estimate)

    @classmethod
    def of_decision(cls, decision: Decision) -> "Chosen":
        """Return the choice that a router, or a shadow, has written."""
        prefill = decision.prefill_worker, decision.prefill_epoch
        workers = prefill, (decision.decode_worker, decision.decode_epoch)
        return cls(decision.mode, workers, decision.orchestration, decision.estimate)


@dataclasses.dataclass(slots=True)
class PlacementChanges:
    """Counts of placements, and of those that would have differed."""

    placements: int = 0
    same: int = 0
    modes: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)  # (actual, other)
    workers: int = 0  # the same mode on other workers
    orchestrations: int = 0  # the same workers, another orchestration
    unseen: int = 0  # placements about which the other settings were not asked
    expected: int = 0  # of those with another mode, those that the router had estimates for
    ttft_ms: float = 0.0  # sum of the differences, by the estimates; positive: later
    tpot_ms: float = 0.0

    def add(self, was: Chosen, would: Chosen) -> bool:
        """Count one placement, and the one in its place; return whether they are the same."""
        self.placements += 1
        if would.mode is not was.mode:
            mode = "wait" if would.mode is Mode.NONE else would.mode.value
            self.modes[was.mode.value, mode] += 1
            self._expect(was, would)
        elif would.workers != was.workers:
            self.workers += 1
        elif would.orchestration is not was.orchestration:
            self.orchestrations += 1
        else:
            self.same += 1
            return True
        return False

    def _expect(self, was: Chosen, would: Chosen) -> None:
        estimate, modes = was.estimate or would.estimate, {was.mode, would.mode}
        if estimate is None or not estimate.ttft_remote_ms or modes != {Mode.LOCAL, Mode.REMOTE}:
            return
        sign = 1 if was.mode is Mode.LOCAL else -1
        self.expected += 1
        self.ttft_ms += sign * (estimate.ttft_remote_ms - estimate.ttft_local_ms)
        self.tpot_ms += sign * (estimate.tpot_remote_ms - estimate.tpot_local_ms)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as JSON shows them."""
        modes = {f"{was} to {would}": number for (was, would), number in self.modes.items()}
        return {**dataclasses.asdict(self), "modes": modes}


class Redeciding:
    """Watches routers of a replay; `changes` counts what the other settings would have changed."""

    def __init__(self, overrides: Mapping[str, str]) -> None:
        """Take settings by name, as text; raises ConfigError for those that placements ignore."""
        for name in overrides:
            if name not in SETTABLE:
                raise ConfigError(
                    f"--set {name}: expected any of {', '.join(sorted(SETTABLE))}; what else is "
                    "set changes more than placements, and only a simulation tells what follows"
                )
        settings = with_overrides(RouterSettings(), overrides)
        Placer(settings, load_table(settings))  # raises for settings that no router can have
        self._overrides = overrides
        self.changes = PlacementChanges()

    def watch(
        self, router: Router, on_placement: Callable[[Placement | None], None] = lambda would: None
    ) -> None:
        """Ask the second placer about each placement; call `on_placement` with its answer."""
        settings = with_overrides(router.settings, self._overrides)
        beside = ShadowPlacer(settings, load_table(settings), router.placer)
        place = router.placer.place

        def placed(case: RequestCase, fleet: Fleet, now_ms: int) -> Placement | None:
            would = beside.would_place(case, fleet, now_ms)
            was = place(case, fleet, now_ms)
            if was is not None:
                self.changes.add(Chosen.of_placement(was), Chosen.of_placement(would))
                on_placement(would)
            return was

        router.placer.place = placed  # type: ignore[method-assign]  # calls both placers


def with_overrides(settings: RouterSettings, overrides: Mapping[str, str]) -> RouterSettings:
    """Return a router's settings with some replaced, given as text; its table file is not needed.
    Raises ConfigError for an unknown setting or a wrong value."""
    for name in overrides:
        if name not in {field.name for field in dataclasses.fields(RouterSettings)}:
            raise ConfigError(f"--set {name}: expected a setting of [router]")
    texts = {f"TRIVIUM_ROUTER_{name.upper()}": text for name, text in overrides.items()}
    values = dataclasses.asdict(settings) | {"table": ""}
    return build("router", RouterSettings, values, environ=texts)

"""What other settings would have changed: asked at each placement, without any effect on it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.replay.redeciding import SETTABLE, Redeciding
from infra.replay.replaying import replay
from infra.simulator.cluster import Checker
from schemas.errors import ConfigError
from streams.config import RouterSettings
from streams.core.effects import Decide, Effect
from streams.core.events import Event
from streams.core.router import Router
from streams.journal.snapshot import pack_router, unpack_router
from tests.infra.replay.played_router import PlayedRouter, answered
from tests.infra.simulator.storms import weathered


class RedecidingChecker(Checker):
    """Ask a router about other settings, beside the same router without questions."""

    def __init__(self, router: Router, **overrides: str) -> None:
        self.redeciding = Redeciding(overrides)
        self._overrides = overrides
        self._router: Router | None = unpack_router(pack_router(router))
        self.redeciding.watch(self._router)
        self.placed = 0

    def on_router_death(self) -> None:
        self._router = None

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        if self._router is None:
            return
        assert self._router.apply(event, int(now_ms)) == list(effects)
        kinds = [effect.decision.kind.value for effect in effects if isinstance(effect, Decide)]
        self.placed += sum(kind in ("place", "replace") for kind in kinds)


SETTINGS = RouterSettings(
    policy="static", local_share=0.3, orchestration="auto", gateway_grace_ms=3_500
)


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ({"policy": "static"}, False),
        ({"local_share": "1"}, True),
        ({"policy": "conditional"}, True),
    ],
)
def test_redeciding_counts_only_changed_placements(
    overrides: dict[str, str], changes: bool
) -> None:
    """The questions change nothing in the router that answers them."""
    checker = RedecidingChecker(Router("router-0", SETTINGS), **overrides)
    weathered(0, count=0, extra_checkers=[checker])
    placement_changes = checker.redeciding.changes
    assert placement_changes.placements == checker.placed > 20
    assert (placement_changes.same < placement_changes.placements) is changes
    assert placement_changes.modes["remote", "local"] > 0 or not changes


@pytest.mark.parametrize("policy", ["pairs", "round_robin"])
def test_redeciding_supports_rotation_policies(policy: str) -> None:
    """These policies compute no prompt on the decode worker."""
    checker = RedecidingChecker(Router("router-0", SETTINGS), policy=policy)
    weathered(0, count=0, extra_checkers=[checker])
    modes = checker.redeciding.changes.modes
    assert modes["local", "remote"] > 0 and not modes["remote", "local"]


def test_redeciding_watches_replay_of_recording(tmp_path: Path) -> None:
    path = answered(PlayedRouter(), ["r1", "r2", "r3"]).recorded(tmp_path / "a.avro")
    redeciding = Redeciding({"policy": "replica"})
    report = replay(path, redeciding.watch)
    assert report.is_equal
    assert redeciding.changes.placements == redeciding.changes.same == 3


def test_redeciding_refuses_setting_without_effect_on_placement() -> None:
    with pytest.raises(ConfigError, match=r"--set queue_tokens_max: expected any of explore_"):
        Redeciding({"queue_tokens_max": "3"})
    fields = RouterSettings.__dataclass_fields__
    assert set(fields) > SETTABLE


def test_redeciding_refuses_invalid_setting_values(tmp_path: Path) -> None:
    router = Router("router-a", RouterSettings())
    with pytest.raises(ConfigError, match="expected any|LOCAL_SHARE"):
        Redeciding({"local_share": "much"}).watch(router)
    with pytest.raises(ConfigError, match="for policy table"):
        Redeciding({"policy": "table"}).watch(router)

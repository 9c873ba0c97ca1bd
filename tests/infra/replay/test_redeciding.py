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
from tests.infra.replay.played import Played, answered
from tests.infra.simulator.storms import weathered


class Asked(Checker):
    """A router whose placements others are asked about, beside the one that is not watched."""

    def __init__(self, router: Router, **given: str) -> None:
        self.redeciding = Redeciding(given)
        self._given = given
        self._router: Router | None = unpack_router(pack_router(router))
        self.redeciding.watch(self._router)
        self.placed = 0

    def on_router_death(self) -> None:
        self._router = None

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        if self._router is None:
            return
        assert self._router.apply(event, int(now_ms)) == list(effects)
        kinds = [each.decision.kind.value for each in effects if isinstance(each, Decide)]
        self.placed += sum(kind in ("place", "replace") for kind in kinds)


SETTINGS = RouterSettings(
    policy="static", local_share=0.3, orchestration="auto", gateway_grace_ms=3_500
)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"policy": "static"}, False),
        ({"local_share": "1"}, True),
        ({"policy": "conditional"}, True),
    ],
)
def test_only_what_is_decided_otherwise_is_a_change(given: dict[str, str], changes: bool) -> None:
    """A router that is asked about goes on as it did."""
    asked = Asked(Router("router-0", SETTINGS), **given)
    weathered(0, count=0, more=[asked])
    found = asked.redeciding.changes
    assert found.placements == asked.placed > 20
    assert (found.same < found.placements) is changes
    assert found.modes["remote", "local"] > 0 or not changes


@pytest.mark.parametrize("policy", ["pairs", "round_robin"])
def test_workers_in_turn_can_be_asked_about(policy: str) -> None:
    """They compute nothing where it is decoded."""
    asked = Asked(Router("router-0", SETTINGS), policy=policy)
    weathered(0, count=0, more=[asked])
    modes = asked.redeciding.changes.modes
    assert modes["local", "remote"] > 0 and not modes["remote", "local"]


def test_a_recording_is_asked_about(tmp_path: Path) -> None:
    path = answered(Played(), ["r1", "r2", "r3"]).recorded(tmp_path / "a.avro")
    redeciding = Redeciding({"policy": "replica"})
    report = replay(path, redeciding.watch)
    assert report.is_equal
    assert redeciding.changes.placements == redeciding.changes.same == 3


def test_a_setting_that_placements_do_not_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set queue_tokens_max: expected any of explore_"):
        Redeciding({"queue_tokens_max": "3"})
    fields = RouterSettings.__dataclass_fields__
    assert set(fields) > SETTABLE


def test_a_wrong_value_is_told(tmp_path: Path) -> None:
    router = Router("router-a", RouterSettings())
    with pytest.raises(ConfigError, match="expected any|LOCAL_SHARE"):
        Redeciding({"local_share": "much"}).watch(router)
    with pytest.raises(ConfigError, match="for policy table"):
        Redeciding({"policy": "table"}).watch(router)

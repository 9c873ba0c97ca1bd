"""A shadow follows journals, says where it would have placed requests, and does nothing else."""

from dataclasses import replace

import pytest

from infra.replay.shadow import Shadow, places_to_read
from schemas.errors import ConfigError
from schemas.records import Decision, JournalBatch, Mode, Role, Work
from streams.config import RouterSettings
from streams.core.effects import Decide, Dispatch, End, RecordUsage, SaveSession
from streams.journal.journal import TICK, JournalEntry
from tests.infra.replay.played_router import PlayedRouter
from tests.streams import builders
from tests.streams.builders import T0

STATIC = RouterSettings(policy="static")
ROOM = {
    "prefill-a": {Role.PREFILL: 50},
    "decode-a": {Role.DECODE: 50},
    "replica-a": {Role.REPLICA: 50},
}


def served(played: PlayedRouter, *names: str) -> PlayedRouter:
    """Apply requests that a worker pair or a replica may take."""
    for worker_id, room in ROOM.items():
        played.happens("fleet", builders.registration(worker_id, *room))
    for seq, name in enumerate(names):
        for worker_id, room in ROOM.items():
            router_id = played.router.router_id
            played.happens("fleet", builders.beat(worker_id, seq, room, router_id=router_id))
        played.happens("requests", builders.request(name, session_id=name))
        played.happens(TICK)
    return played


def decisions_of(
    shadow: Shadow, played: PlayedRouter, entries: list[JournalEntry] | None = None
) -> list[Decision]:
    """Return the decisions of a shadow that follows the journal."""
    batches = [shadow.apply(entry, played.records) for entry in entries or played.entries()]
    return [decision for part in batches for decision, _ in part]


def test_shadow_places_requests_by_its_own_policy() -> None:
    played = served(PlayedRouter(STATIC), "r1", "r2", "r3")
    shadow = Shadow("shadow-a", {"policy": "replica"}, 0)
    decisions = decisions_of(shadow, played)
    assert [(decision.request_id, decision.attempt) for decision in decisions] == [
        (decision.request_id, decision.attempt) for decision in played.decisions
    ]
    assert {decision.router_id for decision in decisions} == {"shadow-a"}
    assert {(decision.mode, decision.policy) for decision in decisions} == {
        (Mode.REPLICA, "replica")
    }
    assert {decision.decode_worker for decision in decisions} == {"replica-a"}
    as_they_were = decisions_of(Shadow("shadow-b", {}, 0), played)
    assert [(decision.mode, decision.decode_worker) for decision in as_they_were] == [
        (decision.mode, decision.decode_worker) for decision in played.decisions
    ]


def test_shadow_decision_has_no_mode_where_request_would_wait() -> None:
    played = PlayedRouter(STATIC)
    played.happens("fleet", builders.registration("replica-a", Role.REPLICA))
    room = {Role.REPLICA: 50}
    played.happens("fleet", builders.beat("replica-a", 0, room, router_id="router-a"))
    played.happens("requests", builders.request("r1"))
    (decision,) = decisions_of(Shadow("shadow-a", {"policy": "replica"}, 0), played)
    assert decision.mode is Mode.REPLICA
    played = PlayedRouter(STATIC)
    for worker_id in ("prefill-a", "decode-a"):
        played.happens("fleet", builders.registration(worker_id, *ROOM[worker_id]))
        beat = builders.beat(worker_id, 0, ROOM[worker_id], router_id="router-a")
        played.happens("fleet", beat)
    played.happens("requests", builders.request("r1"))
    (decision,) = decisions_of(Shadow("shadow-a", {"policy": "replica"}, 0), played)
    assert (decision.mode, decision.prefill_worker, decision.decode_worker) == (Mode.NONE, "", "")


def test_shadow_writes_only_placement_decisions() -> None:
    """The router also sends work, outcomes, usage and sessions; the shadow sends none."""
    played = served(PlayedRouter(RouterSettings(policy="replica")), "r1")
    (order,) = [effect for effect in played.effects if isinstance(effect, Dispatch)]
    assert isinstance(order.record, Work)
    played.happens("outcomes", builders.outcome(order.record, played.now_ms))
    played.happens("cancellations", builders.cancellation("r2"))
    played.happens("requests", builders.request("r2"))
    kinds = {type(effect) for effect in played.effects}
    assert kinds == {Decide, Dispatch, End, SaveSession, RecordUsage}
    shadow = Shadow("shadow-a", {}, 0)
    results = [
        result for entry in played.entries() for result in shadow.apply(entry, played.records)
    ]
    assert [(type(decision), decision.request_id) for decision, _ in results] == [(Decision, "r1")]


def test_shadow_repeats_only_unwritten_decisions_after_its_start() -> None:
    played = served(PlayedRouter(STATIC), "r1", "r2")
    middle_ms = played.now_ms
    late = Shadow("shadow-a", {}, middle_ms)
    assert decisions_of(late, played) == []
    shadow = Shadow("shadow-a", {}, T0)
    assert len(decisions_of(shadow, played)) == 2
    shadow.begin()
    assert len(decisions_of(shadow, played)) == 2, "what was not written is told again"
    shadow.mark_written()
    shadow.begin()
    assert decisions_of(shadow, played) == []


@pytest.mark.parametrize("fault", ["lines", "effects", "records"])
def test_shadow_resumes_at_next_snapshot_after_broken_journal(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    played = served(PlayedRouter(STATIC), "r1", "r2")
    played.snapshot()
    served(played, "r3")
    entries = list(played.entries())
    at = next(i for i, entry in enumerate(entries) if isinstance(entry, JournalBatch))
    batch = entries[at]
    assert isinstance(batch, JournalBatch)
    if fault == "lines":
        entries[at] = replace(batch, first_seq=batch.first_seq + 1)
    elif fault == "effects":
        entries[at] = replace(batch, effects=[effects_sum + 1 for effects_sum in batch.effects])
    else:
        requests = [place for place in played.records if place[0] == "requests"]
        del played.records[requests[0]]
    decisions = decisions_of(Shadow("shadow-a", {}, 0), played, entries)
    assert [decision.request_id for decision in decisions][-1] == "r3"
    assert "r1" not in [decision.request_id for decision in decisions]
    assert "followed again from its next snapshot" in caplog.text


def test_shadow_reads_back_only_referenced_records() -> None:
    played = served(PlayedRouter(STATIC), "r1")
    assert [topic for topic, _, _ in places_to_read(played.entries())] == ["requests"]


@pytest.mark.parametrize(
    "overrides", [{"policy": "worst"}, {"tick_ms": "5"}, {"policy": "table"}, {"local_share": "2"}]
)
def test_shadow_refuses_invalid_settings_at_start(overrides: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Shadow("shadow-a", overrides, 0)

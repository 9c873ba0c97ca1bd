"""A shadow follows journals, says where it would have placed requests, and does nothing else."""

from dataclasses import replace

import pytest

from infra.replay.shadow import Shadow, places_to_read
from schemas.errors import ConfigError
from schemas.records import Decision, JournalBatch, Mode, Role, Work
from streams.config import RouterSettings
from streams.core.effects import Decide, Dispatch, End, RecordUsage, SaveSession
from streams.journal.inputs import TICK
from streams.journal.journal import JournalEntry
from tests.infra.replay.played import Played
from tests.streams import builders
from tests.streams.builders import T0

STATIC = RouterSettings(policy="static")
ROOM = {
    "prefill-a": {Role.PREFILL: 50},
    "decode-a": {Role.DECODE: 50},
    "replica-a": {Role.REPLICA: 50},
}


def served(played: Played, *names: str) -> Played:
    """Requests that a pair or a replica may take."""
    for worker_id, room in ROOM.items():
        played.happens("fleet", builders.registration(worker_id, *room))
    for seq, name in enumerate(names):
        for worker_id, room in ROOM.items():
            router_id = played.router.router_id
            played.happens("fleet", builders.beat(worker_id, seq, room, router_id=router_id))
        played.happens("requests", builders.request(name, session_id=name))
        played.happens(TICK)
    return played


def told(
    shadow: Shadow, played: Played, entries: list[JournalEntry] | None = None
) -> list[Decision]:
    """What the shadow says of a journal."""
    found = [shadow.apply(each, played.records) for each in entries or played.entries()]
    return [decision for part in found for decision, _ in part]


def test_a_shadow_says_where_another_policy_would_have_placed_requests() -> None:
    played = served(Played(STATIC), "r1", "r2", "r3")
    shadow = Shadow("shadow-a", {"policy": "replica"}, 0)
    decisions = told(shadow, played)
    assert [(each.request_id, each.attempt) for each in decisions] == [
        (each.request_id, each.attempt) for each in played.decisions
    ]
    assert {each.router_id for each in decisions} == {"shadow-a"}
    assert {(each.mode, each.policy) for each in decisions} == {(Mode.REPLICA, "replica")}
    assert {each.decode_worker for each in decisions} == {"replica-a"}
    as_they_were = told(Shadow("shadow-b", {}, 0), played)
    assert [(each.mode, each.decode_worker) for each in as_they_were] == [
        (each.mode, each.decode_worker) for each in played.decisions
    ]


def test_what_would_wait_has_no_mode_and_no_worker() -> None:
    played = Played(STATIC)
    played.happens("fleet", builders.registration("replica-a", Role.REPLICA))
    room = {Role.REPLICA: 50}
    played.happens("fleet", builders.beat("replica-a", 0, room, router_id="router-a"))
    played.happens("requests", builders.request("r1"))
    (decision,) = told(Shadow("shadow-a", {"policy": "replica"}, 0), played)
    assert decision.mode is Mode.REPLICA
    played = Played(STATIC)
    for worker_id in ("prefill-a", "decode-a"):
        played.happens("fleet", builders.registration(worker_id, *ROOM[worker_id]))
        beat = builders.beat(worker_id, 0, ROOM[worker_id], router_id="router-a")
        played.happens("fleet", beat)
    played.happens("requests", builders.request("r1"))
    (decision,) = told(Shadow("shadow-a", {"policy": "replica"}, 0), played)
    assert (decision.mode, decision.prefill_worker, decision.decode_worker) == (Mode.NONE, "", "")


def test_nothing_but_decisions_comes_of_what_a_followed_router_does() -> None:
    """Orders, ends, usage and sessions follow there, too, and go nowhere."""
    played = served(Played(RouterSettings(policy="replica")), "r1")
    (order,) = [each for each in played.effects if isinstance(each, Dispatch)]
    assert isinstance(order.record, Work)
    played.happens("outcomes", builders.outcome(order.record, played.now_ms))
    played.happens("cancellations", builders.cancellation("r2"))
    played.happens("requests", builders.request("r2"))
    kinds = {type(each) for each in played.effects}
    assert kinds == {Decide, Dispatch, End, SaveSession, RecordUsage}
    shadow = Shadow("shadow-a", {}, 0)
    found = [each for entry in played.entries() for each in shadow.apply(entry, played.records)]
    assert [(type(decision), decision.request_id) for decision, _ in found] == [(Decision, "r1")]


def test_a_shadow_begins_where_it_starts_and_tells_nothing_twice() -> None:
    played = served(Played(STATIC), "r1", "r2")
    middle_ms = played.now_ms
    late = Shadow("shadow-a", {}, middle_ms)
    assert told(late, played) == []
    shadow = Shadow("shadow-a", {}, T0)
    assert len(told(shadow, played)) == 2
    shadow.begin()
    assert len(told(shadow, played)) == 2, "what was not written is told again"
    shadow.mark_written()
    shadow.begin()
    assert told(shadow, played) == []


@pytest.mark.parametrize("fault", ["lines", "effects", "records"])
def test_a_router_that_cannot_be_followed_is_followed_from_its_next_snapshot(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    played = served(Played(STATIC), "r1", "r2")
    played.snapshot()
    served(played, "r3")
    entries = list(played.entries())
    at = next(i for i, each in enumerate(entries) if isinstance(each, JournalBatch))
    batch = entries[at]
    assert isinstance(batch, JournalBatch)
    if fault == "lines":
        entries[at] = replace(batch, first_seq=batch.first_seq + 1)
    elif fault == "effects":
        entries[at] = replace(batch, effects=[each + 1 for each in batch.effects])
    else:
        requests = [place for place in played.records if place[0] == "requests"]
        del played.records[requests[0]]
    decisions = told(Shadow("shadow-a", {}, 0), played, entries)
    assert [each.request_id for each in decisions][-1] == "r3"
    assert "r1" not in [each.request_id for each in decisions]
    assert "followed again from its next snapshot" in caplog.text


def test_only_records_that_lines_name_are_read_back() -> None:
    played = served(Played(STATIC), "r1")
    assert [topic for topic, _, _ in places_to_read(played.entries())] == ["requests"]


@pytest.mark.parametrize(
    "given", [{"policy": "worst"}, {"tick_ms": "5"}, {"policy": "table"}, {"local_share": "2"}]
)
def test_settings_that_no_placement_follows_are_refused_at_once(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Shadow("shadow-a", given, 0)

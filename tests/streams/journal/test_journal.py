"""What the journal of a router has: enough for a replay, in records that fit the log."""

from schemas.codec import Codec
from schemas.records import Role
from schemas.rules.sizes import JOURNAL_BYTES_MAX, JOURNAL_LINES_MAX
from streams.config import RouterSettings
from streams.core.effects import DropSession
from streams.core.events import FleetRecordArrived, RequestArrived, Tick, UsageLoaded
from streams.core.router import Router
from streams.journal.journal import (
    PASSED_OVER,
    STOPPED,
    TICK,
    Journal,
    effects_sum,
    version_of_core,
)
from streams.journal.snapshot import pack_router, unpack_router
from tests.streams import builders
from tests.streams.builders import T0

CODEC = Codec()
SETTINGS = RouterSettings(policy="static")


def test_journal_numbers_its_lines() -> None:
    journal = Journal("router-a")
    assert journal.cut(1) == []
    journal.add(RequestArrived(builders.request("r1"), 0), "requests", 0, 7, T0, [])
    journal.add(Tick(), TICK, 0, 0, T0 + 50, [])
    (first,) = journal.cut(1)
    journal.add(Tick(), TICK, 0, 0, T0 + 100, [])
    (second,) = journal.cut(1)
    assert (first.topics, first.offsets) == (("requests", "tick"), (7, 0))
    assert (first.first_seq, second.first_seq) == (0, 2)


def test_journal_has_no_news_in_heartbeats_and_idle_ticks() -> None:
    """These lines may be written later."""
    journal = Journal("router-a")
    journal.add(Tick(), TICK, 0, 0, T0, [])
    journal.add(FleetRecordArrived(builders.beat("d0", 1), 3), "fleet", 0, 3, T0, [])
    assert not journal.has_news
    journal.add(Tick(), TICK, 0, 0, T0 + 50, [DropSession("", "s1", 0)])
    assert journal.has_news
    journal.cut(1)
    assert not journal.has_news
    journal.add(RequestArrived(builders.request("r1"), 0), "requests", 0, 7, T0, [])
    assert journal.has_news


def test_journal_cuts_batches_that_fit_log() -> None:
    """What a router applies when it joins a large fleet leaves in batches."""
    journal = Journal("router-a")
    for offset in range(2 * JOURNAL_LINES_MAX + 1):
        journal.add(Tick(), "x" * 249, 2**31 - 1, 2**62 + offset, 2**62, [])
    batches = journal.cut(1)
    assert [batch.first_seq for batch in batches] == [0, JOURNAL_LINES_MAX, 2 * JOURNAL_LINES_MAX]
    assert max(len(CODEC.encode(batch)) for batch in batches) < 4 << 20  # half of what fits
    assert sum(len(batch.offsets) for batch in batches) == 2 * JOURNAL_LINES_MAX + 1


def test_journal_cuts_batches_by_bytes_of_records() -> None:
    journal = Journal("router-a")
    beat = builders.registration("d" * 100_000, Role.DECODE, capability=None)
    for offset in range(25):
        journal.add(FleetRecordArrived(beat, offset), "fleet", 0, offset, T0, [])
    batches = journal.cut(1)
    assert [offset for batch in batches for offset in batch.offsets] == list(range(25))
    assert [batch.first_seq for batch in batches] == [0, 10, 20]
    assert max(len(CODEC.encode(batch)) for batch in batches) < JOURNAL_BYTES_MAX + 1_000


def test_journal_lines_carry_values_that_replay_cannot_read_back() -> None:
    """Compaction removes a heartbeat after minutes; a request stays for a day."""
    journal, beat = Journal("router-a"), builders.beat("d0", 1)
    journal.add(FleetRecordArrived(beat, 3, ahead_ms=-40), "fleet", 0, 3, T0, [])
    journal.add(RequestArrived(builders.request("r1"), 0), "requests", 0, 7, T0, [])
    journal.add(UsageLoaded("r2", 0), PASSED_OVER, 0, 8, T0, [])
    journal.stop(T0 + 1)
    (batch,) = journal.cut(1)
    assert CODEC.encode(CODEC.decode(batch.values[0])) == CODEC.encode(beat)
    assert batch.values[1:] == (b"", b"r2", b"")
    assert batch.ahead_ms[0] == -40
    assert batch.topics[-1] == STOPPED


def test_effects_sum_changes_with_any_difference() -> None:
    effects = [DropSession("", "s1", 0), DropSession("", "s2", 0)]
    variants: tuple[list[DropSession], ...] = (
        [],
        effects[:1],
        effects[::-1],
        [DropSession("", "s1", 1), effects[1]],
    )
    sums = [effects_sum(CODEC, variant) for variant in (effects, *variants)]
    assert len(set(sums)) == len(sums)
    assert effects_sum(CODEC, []) == 0
    assert effects_sum(CODEC, list(effects)) == sums[0]


def test_snapshot_has_settings_version_and_router_state() -> None:
    state = pack_router(Router("router-a", SETTINGS))
    (snapshot,) = Journal("router-a").snapshot(SETTINGS, state, 7, 9, T0)
    assert (snapshot.seq, snapshot.router_epoch, snapshot.at_ms) == (7, 9, T0)
    assert snapshot.version == version_of_core()
    assert '"policy": "static"' in snapshot.settings
    assert unpack_router(snapshot.state).settings.policy == "static"


def test_large_snapshot_is_split_into_parts() -> None:
    state = bytes(range(256)) * (JOURNAL_BYTES_MAX // 100)
    parts = Journal("a").snapshot(SETTINGS, state, 7, 9, T0)
    assert [part.part for part in parts] == [0, 1, 2]
    assert {part.parts for part in parts} == {3}
    assert b"".join(part.state for part in parts) == state
    assert max(len(CODEC.encode(part)) for part in parts) < 2 * JOURNAL_BYTES_MAX

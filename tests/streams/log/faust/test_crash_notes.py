"""Which records members fell on, as commits tell."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError

from schemas.settings import LogSettings
from streams.log.faust import crash_notes
from streams.log.faust.crash_notes import CRASHES_MAX, CrashNotes, crash_error
from streams.log.transactions import CommittedOffset, FullPlace

PLACE = ("documents", 0)
OTHER = ("documents", 1)


class Group:
    """Holds what a group has committed; `app` is that of a member."""

    def __init__(self) -> None:
        self.positions: dict[FullPlace, CommittedOffset] = {}
        self.is_away = False
        self.app = SimpleNamespace(consumer=self)

    async def commit_note(self, tp: TopicPartition, offset: int, note: str) -> None:
        if self.is_away:
            raise CommitFailedError("already rebalanced")
        self.positions[tp.topic, tp.partition] = CommittedOffset(offset, note)

    def note(self) -> str:
        return self.positions["t-documents", 0].metadata


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    fake_group = Group()

    async def committed(
        log: LogSettings, group_id: str, places: Sequence[FullPlace]
    ) -> dict[FullPlace, CommittedOffset]:
        return {
            place: fake_group.positions[place] for place in places if place in fake_group.positions
        }

    monkeypatch.setattr(crash_notes, "committed_offsets", committed)
    return fake_group


def member(group: Group, of: CrashNotes | None = None) -> CrashNotes:
    """Return the notes of a process, or of its next session, that owns both partitions."""
    notes = of or CrashNotes(LogSettings(topic_prefix="t-"), "group")
    app: Any = group.app
    notes.begin_life(app)
    notes.on_assigned({PLACE, OTHER})
    return notes


async def test_crash_notes_count_begun_but_unfinished_attempts(group: Group) -> None:
    """A crash of the process counts like the end of one session in it."""
    notes = member(group)
    assert await notes.begin(PLACE, 7) == 0 and group.note() == "begun=1"
    assert await notes.begin(PLACE, 8) == 0 and group.note() == "begun=1", "only the first"
    assert await notes.begin(OTHER, 3) == 0
    assert await member(group, notes).begin(PLACE, 7) == 1
    assert await member(group).begin(PLACE, 7) == 2
    assert await member(group).begin(PLACE, 7) == CRASHES_MAX and group.note() == "begun=4"
    assert "3 members began this record" in crash_error(CRASHES_MAX).message
    group.positions["t-documents", 0] = CommittedOffset(8, "")  # it is buried
    assert await member(group).begin(PLACE, 8) == 0


async def test_forgiven_attempts_do_not_count_as_crashes(group: Group) -> None:
    """A rebalance or a drain ends the attempt without fault of the record."""
    for _ in range(CRASHES_MAX + 1):
        notes = member(group)
        assert await notes.begin(PLACE, 7) == 0
        await notes.forgive()
        assert group.note() == "begun=0"
    notes = member(group)
    await notes.begin(PLACE, 7)
    notes.end(PLACE, 7)
    await notes.forgive()
    assert group.note() == "begun=1", "it is done, and another commit follows"


async def test_crash_after_finished_record_does_not_count_for_next_record(group: Group) -> None:
    """Each session ends before the finished record was committed."""
    for lives in (0, 1):
        notes = member(group)
        assert await notes.begin(PLACE, 7) == lives
        notes.end(PLACE, 7)
        assert await notes.begin(PLACE, 8) == 0
    assert group.positions["t-documents", 0] == CommittedOffset(8, "begun=1")
    assert await member(group).begin(PLACE, 8) == 1


async def test_crash_notes_remember_forgiveness_without_broker(group: Group) -> None:
    """The broker is away when the attempt is forgiven, and the same process resumes."""
    notes = member(group)
    for _ in range(CRASHES_MAX + 1):
        assert await notes.begin(PLACE, 7) == 0
        group.is_away = True
        await notes.forgive()
        group.is_away = False
        member(group, notes)
    assert await member(group).begin(PLACE, 7) == 1, "another one does not"


async def test_crash_notes_ignore_foreign_metadata(group: Group) -> None:
    for note in ("", "begun=", "begun=x", "other"):
        group.positions["t-documents", 0] = CommittedOffset(7, note)
        assert await member(group).begin(PLACE, 7) == 0
    unassigned = CrashNotes(LogSettings(topic_prefix="t-"), "group")
    assert await unassigned.begin(PLACE, 7) == 0, "before anything is assigned"

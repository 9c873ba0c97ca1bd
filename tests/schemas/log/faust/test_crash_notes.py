"""Which records members fell on, as commits tell."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError

from schemas.log.faust import crash_notes
from schemas.log.faust.crash_notes import CRASHES_MAX, CrashNotes, crash_error
from schemas.log.transactions import CommittedOffset, FullPlace
from schemas.settings import LogSettings

PLACE = ("documents", 0)
OTHER = ("documents", 1)


class Group:
    """What a group has committed; `app` is that of a member."""

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
    made = Group()

    async def committed(
        log: LogSettings, group_id: str, places: Sequence[FullPlace]
    ) -> dict[FullPlace, CommittedOffset]:
        return {place: made.positions[place] for place in places if place in made.positions}

    monkeypatch.setattr(crash_notes, "committed_offsets", committed)
    return made


def member(group: Group, of: CrashNotes | None = None) -> CrashNotes:
    """A process, or the next life of one, that owns both partitions."""
    found = of or CrashNotes(LogSettings(topic_prefix="t-"), "group")
    app: Any = group.app
    found.begin_life(app)
    found.on_assigned({PLACE, OTHER})
    return found


async def test_each_that_begins_and_does_not_end_is_counted(group: Group) -> None:
    """Whether it was a process or one life of it."""
    one = member(group)
    assert await one.begin(PLACE, 7) == 0 and group.note() == "begun=1"
    assert await one.begin(PLACE, 8) == 0 and group.note() == "begun=1", "only the first"
    assert await one.begin(OTHER, 3) == 0
    assert await member(group, one).begin(PLACE, 7) == 1
    assert await member(group).begin(PLACE, 7) == 2
    assert await member(group).begin(PLACE, 7) == CRASHES_MAX and group.note() == "begun=4"
    assert "3 members began this record" in crash_error(CRASHES_MAX).message
    group.positions["t-documents", 0] = CommittedOffset(8, "")  # it is buried
    assert await member(group).begin(PLACE, 8) == 0


async def test_what_ends_otherwise_takes_its_note_back(group: Group) -> None:
    """A rebalance, a drain: the record is at no fault."""
    for _ in range(CRASHES_MAX + 1):
        one = member(group)
        assert await one.begin(PLACE, 7) == 0
        await one.forgive()
        assert group.note() == "begun=0"
    one = member(group)
    await one.begin(PLACE, 7)
    one.end(PLACE, 7)
    await one.forgive()
    assert group.note() == "begun=1", "it is done, and another commit follows"


async def test_who_is_done_is_not_blamed_for_the_record_behind_it(group: Group) -> None:
    """Each life ends before what is done was committed."""
    for lives in (0, 1):
        one = member(group)
        assert await one.begin(PLACE, 7) == lives
        one.end(PLACE, 7)
        assert await one.begin(PLACE, 8) == 0
    assert group.positions["t-documents", 0] == CommittedOffset(8, "begun=1")
    assert await member(group).begin(PLACE, 8) == 1


async def test_where_nothing_can_be_written_the_process_itself_knows(group: Group) -> None:
    """The broker is away, and the same process comes back."""
    one = member(group)
    for _ in range(CRASHES_MAX + 1):
        assert await one.begin(PLACE, 7) == 0
        group.is_away = True
        await one.forgive()
        group.is_away = False
        member(group, one)
    assert await member(group).begin(PLACE, 7) == 1, "another one does not"


async def test_other_metadata_is_none_of_ours(group: Group) -> None:
    for note in ("", "begun=", "begun=x", "other"):
        group.positions["t-documents", 0] = CommittedOffset(7, note)
        assert await member(group).begin(PLACE, 7) == 0
    unassigned = CrashNotes(LogSettings(topic_prefix="t-"), "group")
    assert await unassigned.begin(PLACE, 7) == 0, "before anything is assigned"

"""What is committed of a partition's prompts, and read again by whoever is next."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from streams.bridge.progress import WINDOW, CommitNote, OffsetTracker, decode, encode

METADATA_BYTES_MAX = 4_096  # offset.metadata.max.bytes of a broker


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Offsets of records with gaps between them, and which are answered in which order."""
    gaps = draw(st.lists(st.integers(1, 4), min_size=1, max_size=40))
    offsets, at = [], draw(st.integers(0, 10_000))
    for gap in gaps:
        offsets.append(at)
        at += gap
    answered = draw(st.permutations(offsets))
    return offsets, answered[: draw(st.integers(0, len(answered)))]


@given(histories(), st.integers(0, 40))
def test_offset_tracker_takes_unanswered_rest_once_after_restart(
    history: tuple[list[int], list[int]], read: int
) -> None:
    """This holds for any set of read and answered offsets at the takeover."""
    offsets, answered = history
    first = OffsetTracker(offsets[0])
    for offset in offsets:
        assert first.take(offset)
        assert not first.take(offset), "read once"
    first.mark_answered(answered)
    note = decode(encode(CommitNote({3: 5}, first.answered()), first.position()), first.position())
    rest = [offset for offset in offsets if offset not in answered]
    assert first.position() == min(rest, default=offsets[-1] + 1)
    second = OffsetTracker(first.position(), note.answered)
    new_offsets = [offset for offset in offsets[:read] if second.take(offset)]
    third = OffsetTracker(second.position(), second.answered())
    assert new_offsets == [offset for offset in rest if offset in offsets[:read]]
    offsets_after_restart = [offset for offset in offsets if third.take(offset)]
    assert offsets_after_restart == rest, "nothing was committed by the one between"
    assert note.tokens == {3: 5}


@given(histories())
def test_offset_tracker_counts_pending_commit_as_answered(
    history: tuple[list[int], list[int]],
) -> None:
    offsets, answered = history
    progress, reference = OffsetTracker(offsets[0]), OffsetTracker(offsets[0])
    for offset in offsets:
        progress.take(offset)
        reference.take(offset)
    answered_set = set(answered)
    before = (progress.position(answered_set), progress.answered(answered_set))
    reference.mark_answered(answered)
    assert before == (reference.position(), reference.answered())


def test_commit_note_of_full_window_fits_metadata() -> None:
    """The note also has the token offsets of many gateways."""
    position = 1 << 40
    note = CommitNote(
        dict.fromkeys(range(100), 1 << 40),
        set(range(position + 1, position + WINDOW)),
    )
    metadata = encode(note, position)
    assert len(metadata.encode()) < METADATA_BYTES_MAX
    assert decode(metadata, position) == note


def test_commit_note_ignores_foreign_metadata() -> None:
    for metadata in ("", "null", "{}", '{"t":1,"d":""}', '{"t":[],"d":"?"}', "kafka-tool"):
        assert decode(metadata, 7) == CommitNote()


def test_offset_tracker_reads_no_further_than_window() -> None:
    progress = OffsetTracker(10)
    progress.take(10)
    assert progress.has_room(10 + WINDOW - 1) and not progress.has_room(10 + WINDOW)
    progress.mark_answered([10])
    assert progress.position() == 11 and progress.has_room(10 + WINDOW)


def test_offset_tracker_passes_over_missing_offsets() -> None:
    """Transaction markers and compacted records leave holes."""
    progress = OffsetTracker(5)
    progress.take(5)
    progress.pass_over(9)
    assert not progress.take(7) and progress.answered() == {6, 7, 8}
    progress.mark_answered([5])
    assert progress.position() == 9 and progress.answered() == set()


def test_commit_note_has_stable_encoding() -> None:
    """The bytes matter: Kafka takes 4 096 of them, so no field may be padded."""
    for answered, bitmap in (([], ""), ([6], "Ag=="), ([12], "gA=="), ([12, 13], "gAE=")):
        note = CommitNote({4: 8, 3: 9}, set(answered), 7, start_count=2, suspect_offset=6, falls=1)
        assert encode(note, 5) == f'{{"t":[[3,9],[4,8]],"d":"{bitmap}","w":7,"b":2,"r":6,"f":1}}'
    assert encode(CommitNote(), 5) == '{"t":[],"d":"","w":16777216}'


def test_commit_note_keeps_falls_and_reads_older_format() -> None:
    for note in (
        CommitNote(),
        CommitNote(start_count=2),
        CommitNote(start_count=3, suspect_offset=7, falls=2),
        CommitNote(suspect_offset=7, falls=1),
    ):
        assert decode(encode(note, 5), 5) == note
    earlier = '{"t":[],"d":"AA==","w":9,"b":3,"r":7}'
    assert decode(earlier, 5) == CommitNote(
        window_bytes=9, start_count=3, suspect_offset=7, falls=1
    )
    assert decode(earlier.replace("7", "-1"), 5).falls == 0
    assert decode(earlier.replace("7", "0"), 0).falls == 1


def test_commit_note_without_window_bytes_has_no_byte_limit() -> None:
    note = decode('{"t":[[3,9]],"d":""}', 5)
    assert note.tokens == {3: 9} and note.window_bytes == sys.maxsize


def test_offset_tracker_fills_byte_window_exactly() -> None:
    progress = OffsetTracker(0)
    progress.window_bytes = 10
    assert progress.take(0, 4)
    assert progress.has_room(1, 6) and not progress.has_room(1, 7)
    assert progress.take(1, 6)
    assert progress.has_room(2), "what has no bytes"
    progress.mark_answered([0])
    assert progress.has_room(2, 4) and not progress.has_room(2, 5)
    assert progress.take(2) and progress.has_room(3, 4), "what had none takes none"

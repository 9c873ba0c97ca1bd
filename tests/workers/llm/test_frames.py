"""Frames hold all rows of one gateway partition, once, in order."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import Codec
from schemas.errors import RecordTooLarge
from schemas.records import (
    AnswerDelta,
    DeltaKind,
    Outcome,
    OutcomeKind,
    StreamEnd,
    StreamRetrieved,
    TokenLogprob,
    TopLogprob,
)
from schemas.rules.sizes import (
    DELTAS_BYTES_MAX,
    FRAME_BYTES_MAX,
    RECORD_BYTES_MAX,
    REST_BYTES_MAX,
    check_deltas,
)
from tests.schemas.examples import TRACEPARENT
from workers.llm.frames import Frames, OutgoingFrame

CODEC = Codec()
LOGPROB = TokenLogprob(token_id=7, token="a", logprob=-0.5)
ROWS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["r1", "r2", "r3"]),
        st.lists(st.integers(0, 99), max_size=3),
        st.text(max_size=3),
    )
)


def ending(request_id: str) -> tuple[StreamEnd, Outcome, list[tuple[str, bytes]]]:
    """The last word of a stream, with its outcome."""
    kind = OutcomeKind.CANCELLED
    end = StreamEnd(request_id=request_id, attempt=1, seq=0, chars=0, kind=kind)
    outcome = Outcome(
        request_id=request_id,
        session_id="s",
        attempt=1,
        kind=kind,
        written_by="w1",
        ended_ms=1,
    )
    return end, outcome, [("traceparent", TRACEPARENT)]


@given(ROWS)
def test_frames_preserve_rows(rows: list[tuple[int, str, list[int], str]]) -> None:
    frames = Frames("w1")
    for number, (partition, request_id, ids, text) in enumerate(rows):
        seq = number * 10  # a gap after each row, so that none joins another
        frames.columns(partition).row(request_id, 1, seq, seq, ids, text)
    batches = frames.take(5)
    assert [batch.partition for batch in batches] == list(dict.fromkeys(row[0] for row in rows))
    decoded_rows = []
    for batch in batches:
        frame, start = CODEC.decode(CODEC.encode(batch.frame)), 0
        assert (frame.worker_id, frame.at_ms) == ("w1", 5)
        for n, count in enumerate(frame.token_counts):
            ids = frame.token_ids[start : start + count]
            decoded_rows.append((batch.partition, frame.request_ids[n], list(ids), frame.texts[n]))
            start += count
        assert start == len(frame.token_ids)
    assert sorted(decoded_rows) == sorted(rows)
    assert not frames.pending()
    assert frames.take(6) == []


def test_columns_of_stream_fill_next_frame() -> None:
    frames = Frames("w1")
    columns = frames.columns(3)
    columns.row("r1", 1, 0, 0, [7], "a")
    first = frames.take(1)[0].frame
    columns.row("r1", 1, 1, 1, [8], "b")
    second = frames.take(2)[0].frame
    assert (first.token_ids, second.token_ids) == ([7], [8])
    assert frames.columns(3) is columns


def test_frame_joins_consecutive_tokens_of_stream() -> None:
    frames = Frames("w1")
    columns = frames.columns(3)
    columns.row("r1", 1, 0, 0, [7], "a")
    columns.row("r2", 1, 0, 0, [5], "x")
    columns.row("r1", 1, 1, 1, [8, 9], "bc")
    columns.row("r1", 2, 0, 0, [7], "a")  # another attempt starts again
    columns.row("r2", 1, 4, 4, [6], "y")  # does not follow
    frame = frames.take(1)[0].frame
    assert frame.request_ids == ["r1", "r2", "r1", "r2"]
    assert frame.token_counts == [3, 1, 1, 1]
    assert frame.token_ids == [7, 8, 9, 5, 7, 6]
    assert frame.texts == ["abc", "x", "a", "y"]


def test_frame_separates_rows_with_logprobs() -> None:
    frames = Frames("w1")
    columns = frames.columns(3)
    for seq in range(2):
        columns.row("r1", 1, seq, seq, [seq], "a")
        columns.add_logprobs("r1", [LOGPROB])
    frame = frames.take(1)[0].frame
    assert list(frame.first_seqs) == [entry.first_seq for entry in frame.logprobs] == [0, 1]


def test_busy_partition_keeps_pending_rows() -> None:
    frames = Frames("w1")
    for partition in (3, 4):
        frames.columns(partition).row("r1", 1, 0, 0, [7], "a")
    assert [batch.partition for batch in frames.take(1, {3})] == [4]
    assert frames.pending()
    assert not frames.pending({3})
    assert [batch.partition for batch in frames.take(2)] == [3]


def test_stream_end_carries_outcome() -> None:
    frames = Frames("w1")
    end, outcome, headers = ending("r1")
    frames.columns(0).end(end, outcome, headers)
    assert frames.pending()
    (batch,) = frames.take(1)
    assert list(batch.frame.ends) == [end]
    assert list(batch.reports) == [(outcome, headers)]


def test_logprobs_name_first_token() -> None:
    frames = Frames("w1")
    logprob = TokenLogprob(token_id=7, token="a", logprob=-0.5)
    frames.columns(0).row("r1", 2, 4, 9, [7], "a")
    frames.columns(0).add_logprobs("r1", [logprob])
    (entry,) = frames.take(1)[0].frame.logprobs
    assert (entry.request_id, entry.attempt, entry.first_seq) == ("r1", 2, 4)
    assert list(entry.tokens) == [logprob]


def test_frames_send_only_starts_and_ends_as_urgent() -> None:
    frames = Frames("w1")
    columns = frames.columns(3)
    columns.row("r1", 1, 5, 5, [7], "a")
    columns.row("r2", 1, 9, 9, [8], "b")
    assert not frames.urgent
    assert frames.take(1, urgent_only=True) == []
    columns.row("r2", 1, 10, 10, [9], "c")
    columns.end(*ending("r2"))
    columns.row("r3", 1, 0, 0, [4], "x")
    assert frames.urgent
    (batch,) = frames.take(1, urgent_only=True)
    assert (batch.frame.request_ids, batch.frame.texts) == (["r2", "r3"], ["bc", "x"])
    assert [end.request_id for end in batch.frame.ends] == ["r2"]
    assert len(batch.reports) == 1
    assert frames.pending()
    assert not frames.urgent
    columns.row("r1", 1, 6, 6, [7], "d")
    assert [batch.frame.texts for batch in frames.take(1)] == [["ad"]]


@given(st.lists(st.tuples(st.sampled_from(["r1", "r2", "r3"]), st.booleans()), max_size=40))
def test_frames_deliver_each_stream_whole_and_in_order(steps: list[tuple[str, bool]]) -> None:
    """Batches are taken at random: urgent rows alone, or all."""
    frames, seqs_sent, seqs_received = Frames("w1"), dict[str, int](), dict[str, int]()
    for request_id, urgent_only in [*steps, ("r1", False)]:
        seq = seqs_sent.get(request_id, 0)
        frames.columns(0).row(request_id, 1, seq, seq, [seq], "a")
        seqs_sent[request_id] = seq + 1
        if seqs_sent[request_id] % 4 == 0:
            frames.columns(0).add_logprobs(request_id, [LOGPROB])
        for batch in frames.take(1, urgent_only=urgent_only):
            rows = zip(
                batch.frame.request_ids,
                batch.frame.first_seqs,
                batch.frame.token_counts,
                strict=True,
            )
            for name, first_seq, count in rows:
                assert first_seq == seqs_received.get(name, 0)
                seqs_received[name] = first_seq + count
    assert seqs_received == seqs_sent


def test_clear_drops_pending_rows() -> None:
    frames = Frames("w1")
    frames.columns(0).row("r1", 1, 0, 0, [7], "a")
    frames.clear()
    assert not frames.pending()


def test_frames_split_oversized_frame() -> None:
    """256 streams with the most log-probabilities each arrive whole and in order."""
    frames = Frames("w1")
    columns = frames.columns(3)
    top = [TopLogprob(token_id=2**31 - 1, token="\U0010ffff" * 12, logprob=-0.5)] * 20
    logprob = TokenLogprob(token_id=2**31 - 1, token="\U0010ffff" * 12, logprob=-0.5, top=top)
    names = [f"r{n:026}" for n in range(256)]
    for seq in range(4):
        for name in names:
            columns.row(name, 1, seq, seq, [2**31 - 1], "\U0010ffff")
            columns.add_logprobs(name, [logprob])
    for name in names:
        columns.row(name, 1, 4, 4, [1], "b")  # may wait
    end, outcome, headers = ending(names[0])
    columns.end(end, outcome, headers)
    batches = list(take_parts(frames))
    assert len(batches) > 1
    assert max(len(CODEC.encode(batch.frame)) for batch in batches) < FRAME_BYTES_MAX
    seqs: dict[str, list[int]] = {}
    for batch in batches:
        for name, seq in zip(batch.frame.request_ids, batch.frame.first_seqs, strict=True):
            seqs.setdefault(name, []).append(seq)
    assert seqs == dict.fromkeys(names, list(range(5)))
    assert [len(batch.reports) for batch in batches] == [0] * (len(batches) - 1) + [1]
    assert [len(batch.frame.ends) for batch in batches] == [0] * (len(batches) - 1) + [1]


def take_parts(frames: Frames) -> Iterator[OutgoingFrame]:
    """Every part of what is there; what is left after the first is urgent."""
    yield from frames.take(1)
    while frames.pending():
        assert frames.urgent
        yield from frames.take(1, urgent_only=True)


def test_frames_send_single_oversized_row() -> None:
    frames = Frames("w1")
    for number in range(2):
        frames.columns(0).row(f"r{number}", 1, 0, 0, [7], "a" * FRAME_BYTES_MAX)
    assert [len(batch.frame.texts) for batch in take_parts(frames)] == [1, 1]


def test_frames_of_largest_deltas_fit_into_records() -> None:
    """Every delta that a worker lets through can be written: in rows, in ends, and in both."""
    frames = Frames("w1")
    columns, names = frames.columns(0), [f"r{number}" for number in range(3)]
    delta = AnswerDelta(seq=1, kind=DeltaKind.CALL, text="é" * (DELTAS_BYTES_MAX // 2))
    check_deltas("r1", [delta])
    with pytest.raises(RecordTooLarge, match="r1: expected at most 2097152 bytes of a tool call"):
        check_deltas("r1", [delta, replace(delta, text="a")])
    for seq in range(2):  # they do not join
        for name in names:
            columns.row(name, 1, seq, 0, [7], "")
            columns.add_deltas(name, [delta])
    for name in names:
        end, outcome, headers = ending(name)
        columns.end(replace(end, deltas=[delta]), outcome, headers)
    parts = list(take_parts(frames))
    assert max(len(CODEC.encode(part.frame)) for part in parts) < RECORD_BYTES_MAX - REST_BYTES_MAX
    rows = [name for part in parts for name in part.frame.request_ids]
    assert sorted(rows) == sorted(2 * names)
    assert len([entry for part in parts for entry in part.frame.deltas]) == len(rows)
    ends = [[end.request_id for end in part.frame.ends] for part in parts]
    assert sum(ends, []) == names and max(map(len, ends)) == 1
    assert [len(part.reports) for part in parts] == [len(some) for some in ends]
    assert not any(some for some, part in zip(ends, parts[:-3], strict=False))


def test_large_rows_take_no_more_tokens() -> None:
    """A partition whose frame waits for the broker gets rows of a bounded size."""
    frames = Frames("w1")
    columns = frames.columns(0)
    delta = AnswerDelta(seq=1, kind=DeltaKind.CONTENT, text="a" * (FRAME_BYTES_MAX // 64))
    for seq in range(64):
        columns.row("r1", 1, seq, 0, [7], "")
        columns.add_deltas("r1", [delta])
    parts = list(take_parts(frames))
    assert max(len(CODEC.encode(part.frame)) for part in parts) < FRAME_BYTES_MAX
    firsts = [seq for part in parts for seq in part.frame.first_seqs]
    assert firsts == sorted(firsts) and len(firsts) < 16
    deltas = [row for part in parts for entry in part.frame.deltas for row in entry.deltas]
    assert deltas == 64 * [delta]


def test_clear_drops_pending_parts_of_oversized_frame() -> None:
    frames = Frames("w1")
    for number in range(2):
        frames.columns(0).row(f"r{number}", 1, 0, 0, [7], "a" * FRAME_BYTES_MAX)
    frames.clear()
    assert not frames.pending()


def test_frames_send_retrieval_notice_urgently_and_once() -> None:
    """A split frame carries the notice in its first part, before all later tokens."""
    frames = Frames("w1")
    columns = frames.columns(0)
    notice = StreamRetrieved(request_id="r1", collection="c", probe=1, seq=4)
    columns.row("r1", 1, 3, 3, [7], "a")
    columns.add_notice(notice)
    assert frames.urgent
    (batch,) = frames.take(1, urgent_only=True)
    assert (batch.frame.retrieved, batch.frame.token_ids) == ([notice], [])
    big = "x" * (FRAME_BYTES_MAX // 8)
    columns.add_notice(notice)
    for number in range(4):
        columns.row(f"r{number}", 1, 4, 4, [8], big)
    parts = [frames.take(number)[0].frame for number in (2, 3)]
    assert [len(part.retrieved) for part in parts] == [1, 0]

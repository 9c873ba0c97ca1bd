"""Replays a recording on several cores: each life in pieces, which begin at its snapshots.

Theory of operation. A life's pieces are replayed side by side, each from its own snapshot, and
compared line by line as ever. What they come to is what a replay from the first snapshot on would
come to, if each piece ends in the very state with which the next one begins (`state_equality.py`).
Where one does not, nothing was recorded that shows it yet, but something may follow from it: then
the whole recording is replayed one event after the other, and that counts. Called by `trivium
replay`.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise, takewhile
from pathlib import Path

from infra.replay.recording import LINE, SNAPSHOT, RecordingRow, open_recording
from infra.replay.replaying import (
    ReplayedLife,
    Replayer,
    ReplayReport,
    compare,
    replay,
    split_off_records,
)
from infra.replay.state_equality import same_state
from schemas.codec import Codec
from streams.journal.snapshot import unpack_router

_BEGINS = SNAPSHOT, LINE  # a piece, where one comes behind the other
_WAITING_MAX = 2  # pieces for each process that are read and not replayed, which memory holds


@dataclass(frozen=True, slots=True)
class _PieceResult:
    """What a piece came to."""

    life: ReplayedLife
    is_joined: bool  # it ends as the next piece of its life begins, if there is one
    cpu_s: float


def replay_side_by_side(path: Path, jobs: int) -> ReplayReport:
    """As `replay`, in so many processes; raises RecordError for a file that cannot be replayed."""
    if jobs == 1:
        return replay(path)
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    records: list[RecordingRow] = []
    with open_recording(path) as recording:
        with closing(
            _replay_pieces(_pieces(split_off_records(recording.rows(), records)), jobs)
        ) as results:
            lives, cpu_s = _join_pieces(results)
        report = replay(path) if lives is None else ReplayReport(lives)
        if lives is not None:
            compare(report, records, recording.codec)
    report.wall_s = time.perf_counter() - begun_s
    report.cpu_s = time.process_time() - begun_cpu_s + cpu_s
    return report


def _pieces(rows: Iterable[RecordingRow]) -> Iterator[list[RecordingRow]]:
    """A snapshot, if there is one, and the lines behind it."""
    piece: list[RecordingRow] = []
    for row in rows:
        if piece and (_life(row) != _life(piece[-1]) or (row.kind, piece[-1].kind) == _BEGINS):
            yield piece
            piece = []
        piece.append(row)
    if piece:
        yield piece


def _life(row: RecordingRow) -> tuple[str, int]:
    return row.router_id, row.router_epoch


def _replay_pieces(
    pieces: Iterable[list[RecordingRow]], jobs: int
) -> Generator[_PieceResult, None, None]:
    """Each piece, in order; a single one in this process."""
    waiting: deque[Future[_PieceResult]] = deque()
    pool = ProcessPoolExecutor(jobs)
    try:
        for piece, following in pairwise(chain(pieces, [[]])):
            if not following and not waiting:
                yield replace(_replay(piece, ()), cpu_s=0.0)  # it is this process's
                return
            waiting.append(pool.submit(_replay, piece, _snapshot_behind(piece, following)))
            if len(waiting) > _WAITING_MAX * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # nobody wants the rest
        pool.shutdown(cancel_futures=True)


def _snapshot_behind(
    piece: Sequence[RecordingRow], following: Sequence[RecordingRow]
) -> list[RecordingRow]:
    """Return the snapshot of the next piece, if it is the same life's."""
    if not following or _life(piece[0]) != _life(following[0]):
        return []
    return list(takewhile(lambda row: row.kind == SNAPSHOT, following))


def _replay(piece: Sequence[RecordingRow], following: Sequence[RecordingRow]) -> _PieceResult:
    """In a process of its own: one piece, and whether it ends with the snapshot that follows."""
    begun_s = time.process_time()
    replaying = Replayer(piece, _codec())
    (life,) = replaying.lives()
    is_joined = True
    if following and life.difference is None:
        state = b"".join(_codec().decode(row.value).state for row in following)
        is_joined = replaying.router is not None and same_state(
            replaying.router, unpack_router(state)
        )
    return _PieceResult(life, is_joined, time.process_time() - begun_s)


@cache
def _codec() -> Codec:
    return Codec()


def _join_pieces(results: Iterable[_PieceResult]) -> tuple[list[ReplayedLife] | None, float]:
    """Lives put together, and what that took; None where a piece does not end as the next one
    begins."""
    lives: list[ReplayedLife] = []
    cpu_s = 0.0
    for result in results:
        cpu_s += result.cpu_s
        last, next_life = lives[-1] if lives else None, result.life
        if last is None or (last.router_id, last.epoch) != (next_life.router_id, next_life.epoch):
            lives.append(next_life)
        elif last.difference is None:
            _append(last, next_life)
        else:
            continue  # what follows a difference means nothing
        if not result.is_joined:
            return None, cpu_s
    return lives, cpu_s


def _append(life: ReplayedLife, next_life: ReplayedLife) -> None:
    """Append the next piece of a life to it."""
    life.events += next_life.events
    life.with_effects += next_life.with_effects
    life.first_ms = life.first_ms or next_life.first_ms
    life.last_ms = next_life.last_ms or life.last_ms
    life.is_stopped = next_life.is_stopped
    life.difference = next_life.difference

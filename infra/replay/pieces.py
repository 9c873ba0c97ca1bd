"""Replays a recording on several cores: each router's incarnation in pieces between its snapshots.

Theory of operation. The pieces of an incarnation are replayed side by side, each from its own
snapshot, and compared line by line. Together they give the result of a replay from the first
snapshot on, if each piece ends in exactly the state with which the next one begins
(`state_equality.py`). If one does not, no recorded line shows a difference yet, but a later one
may. Then the whole recording is replayed one event after the other, and that result counts. Called
by `trivium replay`.
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

from infra.replay.replaying import (
    ReplayedLife,
    Replayer,
    ReplayReport,
    compare,
    replay,
    split_off_records,
)
from infra.replay.state_equality import same_state
from infra.traces.recording import LINE, SNAPSHOT, RecordingRow, open_recording
from schemas.codec import Codec
from streams.journal.snapshot import unpack_router

_BEGINS = SNAPSHOT, LINE  # a snapshot after a line begins a piece
_WAITING_MAX = 2  # pieces per process that are read and not replayed yet, which bounds memory


@dataclass(frozen=True, slots=True)
class _PieceResult:
    """The result of replaying one piece."""

    life: ReplayedLife
    is_joined: bool  # it ends in the state of the next piece's snapshot, if there is one
    cpu_s: float


def replay_side_by_side(path: Path, jobs: int) -> ReplayReport:
    """Replay as `replay` does, in `jobs` processes; raises RecordError like it."""
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
    """Yield pieces: a snapshot, if there is one, and the lines after it."""
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
    """Yield the result of each piece, in order; a single piece is replayed in this process."""
    waiting: deque[Future[_PieceResult]] = deque()
    pool = ProcessPoolExecutor(jobs)
    try:
        for piece, following in pairwise(chain(pieces, [[]])):
            if not following and not waiting:
                yield replace(_replay(piece, ()), cpu_s=0.0)  # already counted
                return
            waiting.append(pool.submit(_replay, piece, _snapshot_behind(piece, following)))
            if len(waiting) > _WAITING_MAX * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # the caller may have stopped early
        pool.shutdown(cancel_futures=True)


def _snapshot_behind(
    piece: Sequence[RecordingRow], following: Sequence[RecordingRow]
) -> list[RecordingRow]:
    """Return the snapshot of the next piece, if it is of the same incarnation."""
    if not following or _life(piece[0]) != _life(following[0]):
        return []
    return list(takewhile(lambda row: row.kind == SNAPSHOT, following))


def _replay(piece: Sequence[RecordingRow], following: Sequence[RecordingRow]) -> _PieceResult:
    """Replay one piece in a process of its own, and compare its end with the next snapshot."""
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
    """Return joined incarnations and their CPU time; None for the first if a piece does not end as
    the next one begins."""
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
            continue  # after a difference, later pieces mean nothing
        if not result.is_joined:
            return None, cpu_s
    return lives, cpu_s


def _append(life: ReplayedLife, next_life: ReplayedLife) -> None:
    """Append the next piece's result to its incarnation."""
    life.events += next_life.events
    life.with_effects += next_life.with_effects
    life.first_ms = life.first_ms or next_life.first_ms
    life.last_ms = next_life.last_ms or life.last_ms
    life.is_stopped = next_life.is_stopped
    life.difference = next_life.difference

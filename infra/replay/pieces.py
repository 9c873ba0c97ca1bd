"""Replays a recording on several cores: each life in pieces, which begin at its snapshots.

Theory of operation. A life's pieces are replayed side by side, each from its own snapshot, and
compared line by line as ever. What they come to is what a replay from the first snapshot on would
come to, if each piece ends in the very state with which the next one begins (`alike.py`). Where one
does not, nothing was recorded that shows it yet, but something may follow from it: then the whole
recording is replayed one event after the other, and that counts. Called by `trivium replay`.
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

from infra.replay.alike import alike
from infra.replay.recording import LINE, SNAPSHOT, Row, opened
from infra.replay.replaying import ReplayedLife, Replaying, Report, apart, compare, replay
from schemas.codec import Codec
from streams.journal.snapshot import unpack_router

_BEGINS = SNAPSHOT, LINE  # a piece, where one comes behind the other
_WAITING_MAX = 2  # pieces for each process that are read and not replayed, which memory holds


@dataclass(frozen=True, slots=True)
class _Replayed:
    """What a piece came to."""

    life: ReplayedLife
    is_joined: bool  # it ends as the next piece of its life begins, if there is one
    cpu_s: float


def replay_side_by_side(path: Path, jobs: int) -> Report:
    """As `replay`, in so many processes; raises RecordError for a file that cannot be replayed."""
    if jobs == 1:
        return replay(path)
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    records: list[Row] = []
    with opened(path) as recording:
        with closing(_replayed(_pieces(apart(recording.rows(), records)), jobs)) as found:
            lives, cpu_s = _whole(found)
        report = replay(path) if lives is None else Report(lives)
        if lives is not None:
            compare(report, records, recording.codec)
    report.wall_s = time.perf_counter() - begun_s
    report.cpu_s = time.process_time() - begun_cpu_s + cpu_s
    return report


def _pieces(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """A snapshot, if there is one, and the lines behind it."""
    piece: list[Row] = []
    for row in rows:
        if piece and (_life(row) != _life(piece[-1]) or (row.kind, piece[-1].kind) == _BEGINS):
            yield piece
            piece = []
        piece.append(row)
    if piece:
        yield piece


def _life(row: Row) -> tuple[str, int]:
    return row.router_id, row.router_epoch


def _replayed(pieces: Iterable[list[Row]], jobs: int) -> Generator[_Replayed, None, None]:
    """Each piece, in order; a single one in this process."""
    waiting: deque[Future[_Replayed]] = deque()
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


def _snapshot_behind(piece: Sequence[Row], following: Sequence[Row]) -> list[Row]:
    """That of the next piece, if it is the same life's."""
    if not following or _life(piece[0]) != _life(following[0]):
        return []
    return list(takewhile(lambda row: row.kind == SNAPSHOT, following))


def _replay(piece: Sequence[Row], following: Sequence[Row]) -> _Replayed:
    """In a process of its own: one piece, and whether it ends with the snapshot that follows."""
    begun_s = time.process_time()
    replaying = Replaying(piece, _codec())
    (life,) = replaying.lives()
    is_joined = True
    if following and life.difference is None:
        state = b"".join(_codec().decode(row.value).state for row in following)
        is_joined = replaying.router is not None and alike(replaying.router, unpack_router(state))
    return _Replayed(life, is_joined, time.process_time() - begun_s)


@cache
def _codec() -> Codec:
    return Codec()


def _whole(found: Iterable[_Replayed]) -> tuple[list[ReplayedLife] | None, float]:
    """Lives put together, and what that took; None where a piece does not end as the next one
    begins."""
    lives: list[ReplayedLife] = []
    cpu_s = 0.0
    for each in found:
        cpu_s += each.cpu_s
        last, more = lives[-1] if lives else None, each.life
        if last is None or (last.router_id, last.epoch) != (more.router_id, more.epoch):
            lives.append(more)
        elif last.difference is None:
            _append(last, more)
        else:
            continue  # what follows a difference means nothing
        if not each.is_joined:
            return None, cpu_s
    return lives, cpu_s


def _append(life: ReplayedLife, more: ReplayedLife) -> None:
    """Its next piece."""
    life.events += more.events
    life.with_effects += more.with_effects
    life.first_ms = life.first_ms or more.first_ms
    life.last_ms = more.last_ms or life.last_ms
    life.is_stopped = more.is_stopped
    life.difference = more.difference

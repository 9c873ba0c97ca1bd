"""Decode's side of paired orchestrations: blocks that a peer will write to.

A decode job opens its blocks, tells its peer where they are, and waits until the peer says that it
has written. The blocks of a job that was given up stay out of use until the peer says that it will
not write, or until no write can be under way any more. Times are arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import KvUnavailable, TriviumError
from schemas.records import KvHandle, Orchestration, WireError
from workers.llm.sim.blocks import BlockManager
from workers.llm.sim.moves import Moves
from workers.llm.sim.notices import Notice, NoticeKind
from workers.llm.sim.run import SimRun, Stage
from workers.llm.sim.settings import SimSettings

Target = Callable[[SimRun, int, int], KvHandle]  # run, valid tokens, expiry
Ended = Callable[[SimRun, WireError | None], None]


@dataclass(slots=True)
class _Awaited:
    run: SimRun
    target: KvHandle
    give_up_at_ms: int
    is_dropped: bool = False  # the peer will not write; whoever aborted it will come here too


@dataclass(slots=True)
class _Kept:
    blocks: list[int]
    release_at_ms: int


class Allocations:
    """All decode jobs whose blocks a peer is to write to."""

    def __init__(
        self,
        settings: SimSettings,
        blocks: BlockManager,
        moves: Moves,
        block_bytes: int,
        *,
        target: Target,
        ended: Ended,
    ) -> None:
        self._settings, self._blocks, self._moves = settings, blocks, moves
        self._block_bytes, self._target, self._ended = block_bytes, target, ended
        self._awaited: dict[str, _Awaited] = {}
        self._kept: dict[str, _Kept] = {}
        self.bytes_received = 0
        self.bytes_read = 0  # by peers, of what was valid here

    def __len__(self) -> int:
        return len(self._awaited)

    @property
    def quarantined(self) -> int:
        """Blocks that a peer may still write to though nobody wants it."""
        return sum(len(kept.blocks) for kept in self._kept.values())

    def begin(self, run: SimRun, now_ms: int) -> KvHandle | None:
        """Open the job's blocks; the target for its peer, or None when there is no room yet."""
        kv, size, settings = run.job.kv, self._settings.block_size, self._settings
        assert kv is not None
        table = self._blocks.open(
            run.digest.chain, run.digest.blocks, run.blocks_max(size), run.salt
        )
        if table is None:
            return None
        run.table, run.cached_tokens = table, table.matched * size
        ttl_ms = settings.handle_ttl_ms - settings.handle_margin_ms
        target = self._target(run, run.cached_tokens, min(kv.expires_at_ms, now_ms + ttl_ms))
        give_up_at_ms = target.expires_at_ms + settings.handle_margin_ms
        self._awaited[run.request_id] = _Awaited(run, target, give_up_at_ms)
        if run.job.orchestration is Orchestration.CONCURRENT:
            notice = Notice(kind=NoticeKind.WANT, key=run.request_id, target=target)
            self._moves.tell(kv.engine_id, kv.params, notice.pack())
        return target

    def abandon(self, run: SimRun) -> None:
        """The run ends before its KV came."""
        awaited = self._awaited.pop(run.request_id, None)
        if awaited is None:
            if run.stage is Stage.WAITING:
                self._unwant(run, self._target(run, 0, 0))
            return
        self._unwant(run, awaited.target)
        if not awaited.is_dropped:
            release_at_ms = awaited.give_up_at_ms + self._settings.transfer_timeout_ms
            blocks = self._blocks.detach(run.table, 0)
            self._kept[run.request_id] = _Kept(blocks, release_at_ms)

    def wrote(self, notice: Notice) -> None:
        """The peer has written, and will not again."""
        awaited = self._awaited.pop(notice.key, None)
        if awaited is None:
            self._release(notice.key)
            return
        run = awaited.run
        missing = run.digest.blocks - run.table.matched
        if notice.kv_bytes != missing * self._block_bytes:
            error = KvUnavailable(
                f"{notice.key}: expected {missing} blocks, found {notice.kv_bytes} bytes written"
            )
            self._ended(run, error.to_wire())
            return
        run.kv_bytes = notice.kv_bytes
        self.bytes_received += notice.kv_bytes
        self._ended(run, None)

    def read(self, notice: Notice) -> bool:
        """The peer has read what was valid here; whether the notice was about a job here."""
        is_known = notice.key in self._awaited or notice.key in self._kept
        self.bytes_read += notice.kv_bytes if is_known else 0
        return is_known

    def dropped(self, notice: Notice) -> None:
        """The peer will not write; its error, if it has one, is this job's too."""
        awaited = self._awaited.get(notice.key)
        if awaited is None:
            self._release(notice.key)
            return
        awaited.is_dropped = True
        if notice.error is not None:
            self._ended(awaited.run, notice.error)

    def lost(self, engine_id: str) -> None:
        """A peer is gone, so nothing will come from it."""
        for awaited in self._awaited.values():
            kv = awaited.run.job.kv
            if kv is not None and kv.engine_id == engine_id:
                self._fail(awaited, KvUnavailable(f"{awaited.run.request_id}: its peer is gone"))

    def poll(self, now_ms: int) -> None:
        """Give up on peers that are late, and release what is safe by now."""
        for awaited in self._awaited.values():
            if now_ms >= awaited.give_up_at_ms:
                late = KvUnavailable(f"{awaited.run.request_id}: no KV came in time")
                self._fail(awaited, late)
        safe = [key for key, kept in self._kept.items() if now_ms >= kept.release_at_ms]
        for key in safe:
            self._release(key)

    def _fail(self, awaited: _Awaited, error: TriviumError) -> None:
        self._ended(awaited.run, error.to_wire())

    def _unwant(self, run: SimRun, target: KvHandle) -> None:
        kv = run.job.kv
        assert kv is not None
        notice = Notice(kind=NoticeKind.UNWANTED, key=run.request_id, target=target)
        self._moves.tell(kv.engine_id, kv.params, notice.pack())

    def _release(self, key: str) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._blocks.release(kept.blocks)

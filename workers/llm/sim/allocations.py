"""The decode side of paired orchestrations: blocks that a peer will write to.

A decode job opens its blocks, sends their handle to its peer, and waits for the notice that they
were written. The blocks of an abandoned job are not reused until the peer has sent a notice that it
will not write, or until no write can be in flight any more. Times are arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import KvUnavailable, TriviumError
from schemas.records import KvHandle, Orchestration, WireError
from workers.llm.sim.blocks import BlockManager
from workers.llm.sim.moves import Moves, Notice, NoticeKind
from workers.llm.sim.run import SimRun, Stage
from workers.llm.sim.settings import SimSettings

Target = Callable[[SimRun, int, int], KvHandle]  # run, valid tokens, expiry
OnRunEnd = Callable[[SimRun, WireError | None], None]


@dataclass(slots=True)
class _ExpectedWrite:
    run: SimRun
    target: KvHandle
    give_up_at_ms: int
    is_dropped: bool = False  # the peer will not write


@dataclass(slots=True)
class _Quarantine:
    blocks: list[int]
    release_at_ms: int


class Allocations:
    """All decode jobs whose blocks a peer will write to."""

    def __init__(
        self,
        settings: SimSettings,
        blocks: BlockManager,
        moves: Moves,
        block_bytes: int,
        *,
        target: Target,
        on_end: OnRunEnd,
    ) -> None:
        self._settings, self._blocks, self._moves = settings, blocks, moves
        self._block_bytes, self._target, self._on_end = block_bytes, target, on_end
        self._pending: dict[str, _ExpectedWrite] = {}
        self._quarantines: dict[str, _Quarantine] = {}
        self.bytes_received = 0
        self.bytes_read = 0  # by peers, of valid blocks

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def quarantined(self) -> int:
        """Return the number of blocks of abandoned jobs that a peer may still write to."""
        return sum(len(quarantine.blocks) for quarantine in self._quarantines.values())

    def begin(self, run: SimRun, now_ms: int) -> KvHandle | None:
        """Open the job's blocks; return their handle for the peer, or None if there is no room."""
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
        self._pending[run.request_id] = _ExpectedWrite(run, target, give_up_at_ms)
        if run.job.orchestration is Orchestration.CONCURRENT:
            notice = Notice(kind=NoticeKind.WANT, key=run.request_id, target=target)
            self._moves.tell(kv.engine_id, kv.params, notice.pack())
        return target

    def abandon(self, run: SimRun) -> None:
        """End a run before its KV has arrived, and notify its peer."""
        pending = self._pending.pop(run.request_id, None)
        if pending is None:
            if run.stage is Stage.WAITING:
                self._send_unwanted(run, self._target(run, 0, 0))
            return
        self._send_unwanted(run, pending.target)
        if not pending.is_dropped:
            release_at_ms = pending.give_up_at_ms + self._settings.transfer_timeout_ms
            blocks = self._blocks.detach(run.table, 0)
            self._quarantines[run.request_id] = _Quarantine(blocks, release_at_ms)

    def on_written(self, notice: Notice) -> None:
        """Continue the job whose peer has written, or release its abandoned blocks."""
        pending = self._pending.pop(notice.key, None)
        if pending is None:
            self._release(notice.key)
            return
        run = pending.run
        missing = run.digest.blocks - run.table.matched
        if notice.kv_bytes != missing * self._block_bytes:
            error = KvUnavailable(
                f"{notice.key}: expected {missing} blocks, found {notice.kv_bytes} bytes written"
            )
            self._on_end(run, error.to_wire())
            return
        run.kv_bytes = notice.kv_bytes
        self.bytes_received += notice.kv_bytes
        self._on_end(run, None)

    def on_read(self, notice: Notice) -> bool:
        """Count the bytes that a peer has read; return whether the notice is about a job here."""
        is_known = notice.key in self._pending or notice.key in self._quarantines
        self.bytes_read += notice.kv_bytes if is_known else 0
        return is_known

    def on_dropped(self, notice: Notice) -> None:
        """Note that the peer will not write; if the notice has an error, the job fails with it."""
        pending = self._pending.get(notice.key)
        if pending is None:
            self._release(notice.key)
            return
        pending.is_dropped = True
        if notice.error is not None:
            self._on_end(pending.run, notice.error)

    def on_peer_lost(self, engine_id: str) -> None:
        """Fail the jobs that wait for a peer that is gone."""
        for pending in self._pending.values():
            kv = pending.run.job.kv
            if kv is not None and kv.engine_id == engine_id:
                self._fail(pending, KvUnavailable(f"{pending.run.request_id}: its peer is gone"))

    def poll(self, now_ms: int) -> None:
        """Give up on peers that are late, and release blocks that no peer can write to now."""
        for pending in self._pending.values():
            if now_ms >= pending.give_up_at_ms:
                late = KvUnavailable(f"{pending.run.request_id}: no KV came in time")
                self._fail(pending, late)
        safe = [
            key
            for key, quarantine in self._quarantines.items()
            if now_ms >= quarantine.release_at_ms
        ]
        for key in safe:
            self._release(key)

    def _fail(self, pending: _ExpectedWrite, error: TriviumError) -> None:
        self._on_end(pending.run, error.to_wire())

    def _send_unwanted(self, run: SimRun, target: KvHandle) -> None:
        kv = run.job.kv
        assert kv is not None
        notice = Notice(kind=NoticeKind.UNWANTED, key=run.request_id, target=target)
        self._moves.tell(kv.engine_id, kv.params, notice.pack())

    def _release(self, key: str) -> None:
        quarantine = self._quarantines.pop(key, None)
        if quarantine is not None:
            self._blocks.release(quarantine.blocks)

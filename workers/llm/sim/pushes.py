"""The prefill side of paired orchestrations: writes KV into a peer's blocks.

With `decode_first` the job has the peer's blocks, and KV that only the peer has is read first. With
`concurrent` the peer sends its blocks. When both sides are ready, the blocks that the peer lacks
are written. However the job ends, the peer gets a notice once nothing can write to its blocks any
more. Times are arguments.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from schemas.errors import KvUnavailable, TriviumError
from schemas.records import KvHandle, Orchestration, WireError
from workers.kv.transfer import Direction
from workers.llm.engine import Job
from workers.llm.sim.blocks import BlockManager
from workers.llm.sim.handles import HandleRules
from workers.llm.sim.moves import Moves, Moving, Notice, NoticeKind
from workers.llm.sim.run import SimRun
from workers.llm.sim.settings import SimSettings

_WANTS_MAX = 4_096  # for jobs that have not arrived; beyond it the oldest is dropped, and expires
_OVER_MAX = 16_384  # remembered keys of jobs that are over


@dataclass(slots=True)
class _Push:
    run: SimRun
    target: KvHandle  # the peer to notify; with blocks, those to write to
    is_allocated: bool
    give_up_at_ms: int = 0  # set when the KV is computed


class Pushes:
    """All paired prefill jobs of one engine."""

    def __init__(
        self,
        settings: SimSettings,
        blocks: BlockManager,
        moves: Moves,
        rules: HandleRules,
        block_bytes: int,
        *,
        on_end: Callable[[SimRun, WireError | None], None],
    ) -> None:
        self._settings, self._blocks, self._moves, self._rules = settings, blocks, moves, rules
        self._block_bytes, self._on_end = block_bytes, on_end
        self._open: dict[str, _Push] = {}
        self._computed: dict[str, _Push] = {}  # pushes that wait for their peer, oldest first
        self._ready: deque[_Push] = deque()  # pushes that wait for a place in the batch
        self._wants: dict[str, KvHandle] = {}
        self._over: dict[str, WireError | None] = {}
        self.bytes_sent = self.bytes_read = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_ready(self) -> bool:
        """Return whether a write can be posted."""
        return bool(self._ready)

    def refusal(self, job: Job) -> TriviumError | None:
        """Return why a job must not start; None if it may."""
        if job.request_id in self._over:
            return KvUnavailable(f"{job.request_id}: its peer gave up, or it was here before")
        return None

    def reject(self, job: Job, error: WireError) -> None:
        """Notify the peer of a job that did not start."""
        if job.kv_target is not None and job.request_id not in self._over:
            self._note_over(job.request_id, error)
            self._tell_dropped(job.request_id, job.kv_target, error)

    def take(self, run: SimRun) -> None:
        """Register a paired prefill job, with its peer's blocks if they are already known."""
        target = run.job.kv_target
        assert target is not None
        is_allocated = run.job.orchestration is Orchestration.DECODE_FIRST
        push = self._open[run.request_id] = _Push(run, target, is_allocated)
        want = self._wants.pop(run.request_id, None)
        if want is not None:
            self._allocate(push, want)

    def read(self, run: SimRun, now_s: float, now_ms: int) -> bool:
        """Read the valid blocks of the peer that this engine lacks; return False if none."""
        target, matched = self._open[run.request_id].target, run.table.matched
        size = self._settings.block_size
        valid = min(target.tokens, run.prompt_tokens - 1) // size  # one token is always computed
        if valid <= matched or not target.block_ids:
            return False
        kv_bytes = (valid - matched) * self._block_bytes
        notice = Notice(kind=NoticeKind.READ, key=run.request_id, kv_bytes=kv_bytes)
        moving = run.moving = Moving(
            engine_id=target.engine_id,
            params=target.params,
            remote=target.block_ids[matched:valid],
            local=run.table.blocks[matched:valid],
            notice=notice.pack(),
            refusal=partial(self._rules.why_stale, target),
        )
        moving.on_end = partial(self._on_read, run, moving, valid * size)
        self._moves.begin(moving, now_s, now_ms)
        return True

    def on_computed(self, run: SimRun, now_ms: int) -> None:
        """Queue the write of a run whose KV is computed, or wait for the peer's blocks."""
        push = self._open[run.request_id]
        push.give_up_at_ms = now_ms + self._settings.handle_ttl_ms
        if push.is_allocated:
            self._ready.append(push)
        else:
            self._computed[run.request_id] = push

    def write_next(self, now_s: float, now_ms: int) -> SimRun:
        """Post the write of the blocks that the peer lacks; the run has a place in the batch."""
        push = self._ready.popleft()
        run, target = push.run, push.target
        first = target.tokens // self._settings.block_size
        local = run.table.blocks[first : run.digest.blocks]
        kv_bytes = len(local) * self._block_bytes
        notice = Notice(kind=NoticeKind.WROTE, key=run.request_id, kv_bytes=kv_bytes)
        moving = run.moving = Moving(
            engine_id=target.engine_id,
            params=target.params,
            direction=Direction.WRITE,
            remote=target.block_ids[first:],
            local=local,
            notice=notice.pack(),
            refusal=partial(self._rules.why_stale, target),
        )
        moving.on_end = partial(self._on_written, run, moving, kv_bytes)
        self._moves.begin(moving, now_s, now_ms)
        return run

    def on_want(self, notice: Notice) -> None:
        """Take the blocks that the peer has allocated for a job."""
        want, push = notice.target, self._open.get(notice.key)
        assert want is not None
        if notice.key in self._over:
            self._tell_dropped(notice.key, want, self._over[notice.key])
        elif push is not None:
            self._allocate(push, want)
        else:
            self._wants[notice.key] = want
            if len(self._wants) > _WANTS_MAX:
                del self._wants[next(iter(self._wants))]

    def on_unwanted(self, notice: Notice) -> None:
        """End the job of a peer that gave up; a write in flight is not interrupted."""
        assert notice.target is not None
        push = self._open.get(notice.key)
        error = KvUnavailable(f"{notice.key}: its decode worker gave up").to_wire()
        if push is None:
            self._wants.pop(notice.key, None)
            if notice.key not in self._over:
                self._note_over(notice.key, error)
                self._tell_dropped(notice.key, notice.target, None)
        elif not self._is_writing(push.run):
            self._on_end(push.run, error)

    def finish(self, run: SimRun) -> None:
        """End a job whose KV was written."""
        del self._open[run.request_id]
        self._note_over(run.request_id, None)

    def abandon(self, run: SimRun, error: WireError | None) -> None:
        """End a run before its write; notify the peer when none of its blocks moves any more."""
        push = self._open.pop(run.request_id, None)
        if push is None:
            return
        self._note_over(run.request_id, error)
        self._computed.pop(run.request_id, None)
        if push in self._ready:
            self._ready.remove(push)
        moving = run.moving
        if moving is None or moving.is_settled:
            self._tell_dropped(run.request_id, push.target, error)
            return
        moving.on_settled = partial(self._on_settled, push, moving, error)
        is_read = moving.direction is Direction.READ
        blocks = self._blocks.detach(run.table, run.table.matched if is_read else 0)
        self._moves.abandon(moving, blocks)

    def poll(self, now_ms: int) -> None:
        """Give up on peers that did not request their KV in time."""
        while self._computed:
            push = next(iter(self._computed.values()))
            if push.give_up_at_ms > now_ms:
                return
            del self._computed[push.run.request_id]
            ttl_ms = self._settings.handle_ttl_ms
            key = push.run.request_id
            late = KvUnavailable(f"{key}: decode did not ask for its KV within {ttl_ms} ms")
            self._on_end(push.run, late.to_wire())

    def _allocate(self, push: _Push, want: KvHandle) -> None:
        """Set the peer's blocks as the job's target, if they are from the expected peer."""
        target = push.target
        is_same = (target.worker_id, target.worker_epoch, target.engine_id) == (
            want.worker_id,
            want.worker_epoch,
            want.engine_id,
        )
        if push.is_allocated or not is_same:
            return
        push.target, push.is_allocated = want, True
        misfit = self._rules.misfit(want, push.run.prompt_tokens)
        if misfit is not None:
            self._on_end(push.run, misfit.to_wire())
        if self._computed.pop(push.run.request_id, None) is not None:
            self._ready.append(push)

    def _on_read(self, run: SimRun, moving: Moving, valid_tokens: int, error: str) -> None:
        if not moving.is_settled:  # the read may still write the blocks, so do not compute them
            late = KvUnavailable(f"{run.request_id}: the decode worker's KV was not read: {error}")
            self._on_end(run, late.to_wire())
            return
        if not error:
            run.kv_bytes, run.transfer_ms = (
                len(moving.local) * self._block_bytes,
                moving.duration_ms,
            )
            self.bytes_read += run.kv_bytes
            run.cached_tokens = valid_tokens
        self._on_end(run, None)

    def _on_written(self, run: SimRun, moving: Moving, kv_bytes: int, error: str) -> None:
        if error:
            failed = KvUnavailable(f"{run.request_id}: its KV was not written: {error}")
            self._on_end(run, failed.to_wire())
            return
        run.kv_bytes, run.transfer_ms = kv_bytes, moving.duration_ms
        self.bytes_sent += kv_bytes
        self._on_end(run, None)

    def _on_settled(
        self, push: _Push, moving: Moving, error: WireError | None, failed: str
    ) -> None:
        """Notify the peer after an abandoned job's move, unless its write has succeeded."""
        if failed or moving.direction is Direction.READ:
            self._tell_dropped(push.run.request_id, push.target, error)

    def _is_writing(self, run: SimRun) -> bool:
        return run.moving is not None and run.moving.direction is Direction.WRITE

    def _note_over(self, key: str, error: WireError | None) -> None:
        self._over[key] = error
        if len(self._over) > _OVER_MAX:
            del self._over[next(iter(self._over))]

    def _tell_dropped(self, key: str, target: KvHandle, error: WireError | None) -> None:
        notice = Notice(kind=NoticeKind.DROPPED, key=key, error=error)
        self._moves.tell(target.engine_id, target.params, notice.pack())

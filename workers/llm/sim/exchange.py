"""The exchange of KV between one simulated engine and others.

It keeps a prompt's blocks until they are read or expire, checks handles, and reads blocks that the
prefix cache lacks. Paired orchestrations are in `allocations.py` (decode) and `pushes.py`
(prefill). `poll` returns the jobs whose KV has moved; the schedule decides what follows. Times are
arguments.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from schemas.errors import KvUnavailable, TriviumError
from schemas.records import KvHandle, Orchestration, WireError, WorkPhase
from workers.kv.transfer import KvTransfer
from workers.llm.engine import EngineLoad, Job, PeerMetadata
from workers.llm.sim.allocations import Allocations
from workers.llm.sim.arena import KvArena
from workers.llm.sim.blocks import BlockManager
from workers.llm.sim.handles import EngineOwner, HandleRules, PinnedPrompt
from workers.llm.sim.moves import Moves, Moving, Notice, NoticeKind
from workers.llm.sim.pushes import Pushes
from workers.llm.sim.run import SimRun
from workers.llm.sim.settings import SimSettings


class KvExchange:
    """Both sides of the hand-over. Without a transfer, only the own engine's KV can be used."""

    def __init__(
        self,
        settings: SimSettings,
        owner: EngineOwner,
        blocks: BlockManager,
        arena: KvArena,
        transfer: KvTransfer,
    ) -> None:
        self._settings, self._owner, self._blocks, self._arena = settings, owner, blocks, arena
        # by `engine_request_id`, in order of expiry, because the time to live is constant
        self._pins: dict[str, PinnedPrompt] = {}
        self._rules = HandleRules(settings.block_size)
        self._moves = Moves(settings, blocks, transfer)
        size = arena.block_bytes
        self.allocations = Allocations(
            settings, blocks, self._moves, size, target=self._target, on_end=self._end
        )
        self.pushes = Pushes(settings, blocks, self._moves, self._rules, size, on_end=self._end)
        self._fetching: dict[str, SimRun] = {}
        self._ends: list[tuple[SimRun, WireError | None]] = []
        self._serial = 0
        self._bytes_read = self._bytes_fetched = 0
        self.expired_total = 0

    def add_transfers(self, load: EngineLoad) -> EngineLoad:
        """Return the load with the figures of KV moves; bytes include reads and writes of peers."""
        return replace(
            load,
            kv_bytes_sent=self._bytes_read + self.pushes.bytes_sent + self.allocations.bytes_read,
            kv_bytes_received=self._bytes_fetched
            + self.allocations.bytes_received
            + self.pushes.bytes_read,
            kv_handles_held=len(self._pins),
            extra={
                "fetching": len(self._fetching),
                "awaiting": len(self.allocations),
                "pushing": len(self.pushes),
                "quarantined": self.allocations.quarantined,
                "fetch_failures_total": self._moves.failures_total,
                "handles_expired_total": self.expired_total,
                **load.extra,
            },
        )

    @property
    def is_urgent(self) -> bool:
        """Return whether KV moves, or will as soon as a peer sends a notice."""
        return self._moves.is_busy or bool(self.allocations)

    @property
    def is_busy(self) -> bool:
        """Return whether peers may still read from this engine or send it notices."""
        quarantine_size = self.allocations.quarantined
        return bool(self.is_urgent or self._pins or self.pushes or quarantine_size)

    def hold(self, run: SimRun, now_ms: int) -> KvHandle:
        """Keep a computed prompt for its peer; the exchange then owns the table."""
        self._serial += 1
        key = f"{run.request_id}-{self._serial:x}"
        release_at_ms = now_ms + self._settings.handle_ttl_ms
        self._pins[key] = PinnedPrompt(run.request_id, run.table, release_at_ms)
        expires_at_ms = release_at_ms - self._settings.handle_margin_ms
        return self._handle(run, key, run.prompt_tokens, expires_at_ms)

    def release(self, request_id: str) -> None:
        """Free the KV that is kept for a request."""
        for key in [key for key, pin in self._pins.items() if pin.request_id == request_id]:
            self._drop(key)

    def refusal(self, run: SimRun, now_ms: int) -> TriviumError | None:
        """Mark a job's handle as used, or return why it must not be used."""
        job, is_decode = run.job, run.job.phase is WorkPhase.DECODE
        kv = job.kv if is_decode else job.kv_target if job.is_paired else None
        if kv is None:
            missing = KvUnavailable(f"{run.request_id}: expected a KV handle of its peer")
            return missing if job.is_paired else None
        is_own = kv.engine_id == self._owner.engine_id
        if self._settings.transfer == "none" and not is_own:
            return KvUnavailable(f"{kv.engine_request_id}: this engine has no KV transfer")
        if not job.is_paired:
            error = self._rules.use(kv, run.prompt_tokens, now_ms)
        elif is_own or kv.engine_request_id != run.request_id:
            error = KvUnavailable(
                f"{run.request_id}: expected a handle of it of another engine, found "
                f"{kv.engine_request_id} of {kv.engine_id}"
            )
        elif is_decode:
            error = self._rules.use_promise(kv, run.prompt_tokens, now_ms)
        elif job.orchestration is Orchestration.DECODE_FIRST and not kv.block_ids:
            error = KvUnavailable(f"{run.request_id}: expected a target with blocks")
        else:
            error = self.pushes.refusal(job)
            error = error or self._rules.use_target(kv, run.prompt_tokens, now_ms)
        if error is None:
            self.observe_worker(kv.worker_id, kv.worker_epoch, kv.engine_id)
        return error

    def reject(self, job: Job, error: TriviumError) -> None:
        """Notify the peer of a paired job that did not start."""
        if job.phase is WorkPhase.PREFILL:
            self.pushes.reject(job, error.to_wire())
        elif job.kv is not None and self._settings.transfer != "none":
            target = self._handle(None, job.request_id, 0, 0)
            notice = Notice(kind=NoticeKind.UNWANTED, key=job.request_id, target=target)
            self._moves.tell(job.kv.engine_id, job.kv.params, notice.pack())

    def set_peer_metadata(self, peer_metadata: PeerMetadata) -> None:
        """Set how to find peers' metadata; handles omit it from now on, as the fleet lists it."""
        self._moves.peer_metadata = peer_metadata

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of new handles. The blocks of earlier handles are kept until they expire,
        because a peer may be reading.
        """
        self._owner.worker_epoch = epoch

    def observe_worker(self, worker_id: str, epoch: int, engine_id: str) -> None:
        """Note a peer's latest epoch; drop its earlier engine, and refuse that engine's KV."""
        former_engine = self._rules.observe_epoch(worker_id, epoch, engine_id)
        if former_engine is None or engine_id == self._owner.engine_id:
            return
        if former_engine:
            self._drop_peer(former_engine)
        find = self._moves.peer_metadata
        if find is not None and find(engine_id):  # connect now, not at its first use
            self._moves.tell(engine_id, b"", b"")

    def begin(self, run: SimRun, now_s: float, now_ms: int) -> bool:
        """Open blocks and post the read; return False if there is no room yet."""
        size = self._settings.block_size
        table = self._blocks.open(
            run.digest.chain, run.digest.blocks, run.blocks_max(size), run.salt
        )
        if table is None:
            return False
        run.table, run.cached_tokens = table, table.matched * size
        self._fetching[run.request_id] = run
        self._fetch(run, now_s, now_ms)
        return True

    def abandon(self, run: SimRun, error: WireError | None = None) -> None:
        """End a run early; its blocks are freed once no move can access them."""
        if run.is_paired_prefill:
            self.pushes.abandon(run, error)
        elif run.job.is_paired:
            self.allocations.abandon(run)
        elif self._fetching.pop(run.request_id, None) is not None and run.moving is not None:
            self._moves.abandon(run.moving, self._blocks.detach(run.table, run.table.matched))
        if not run.table.closed:
            self._blocks.close(run.table)

    def poll(self, now_s: float, now_ms: int) -> Sequence[tuple[SimRun, WireError | None]]:
        """Make progress; return the runs whose KV has moved, or will not, with the error."""
        while self._pins and next(iter(self._pins.values())).release_at_ms <= now_ms:
            self.expired_total += self._drop(next(iter(self._pins)))
        for notice in self._moves.poll(now_s, now_ms):
            self._on_notice(notice)
        self.allocations.poll(now_ms)
        self.pushes.poll(now_ms)
        ends, self._ends = self._ends, []
        return ends

    def close(self) -> None:
        """Free the transfer; moves in flight are abandoned."""
        self._moves.transfer.close()

    def _drop_peer(self, engine_id: str) -> None:
        """Drop the connection of a peer that is gone, and fail jobs that wait for it."""
        self._moves.transfer.forget(engine_id)
        self.allocations.on_peer_lost(engine_id)

    def _end(self, run: SimRun, error: WireError | None) -> None:
        self._ends.append((run, error))

    def _on_notice(self, notice: Notice) -> None:
        match notice.kind:
            case NoticeKind.READ:
                if not self.allocations.on_read(notice) and self._drop(notice.key):
                    self._bytes_read += notice.kv_bytes
            case NoticeKind.WANT:
                self.pushes.on_want(notice)
            case NoticeKind.WROTE:
                self.allocations.on_written(notice)
            case NoticeKind.UNWANTED:
                self.pushes.on_unwanted(notice)
            case NoticeKind.DROPPED:
                self.allocations.on_dropped(notice)

    def _handle(self, run: SimRun | None, key: str, tokens: int, expires_at_ms: int) -> KvHandle:
        """Return a handle of the run's blocks; without a run, one that names only this engine."""
        is_known = self._moves.peer_metadata is not None
        return KvHandle(
            worker_id=self._owner.worker_id,
            worker_epoch=self._owner.worker_epoch,
            engine_id=self._owner.engine_id,
            engine_request_id=key,
            tokens=tokens,
            block_size=self._settings.block_size,
            block_ids=tuple(run.table.blocks[: run.digest.blocks]) if run is not None else (),
            expires_at_ms=expires_at_ms,
            params=b"" if is_known else self._moves.transfer.metadata(),
        )

    def _target(self, run: SimRun, tokens: int, expires_at_ms: int) -> KvHandle:
        return self._handle(run, run.request_id, tokens, expires_at_ms)

    def _fetch(self, run: SimRun, now_s: float, now_ms: int) -> None:
        """Read the blocks that the prefix cache lacks; the producer gets a notice in any case."""
        kv, matched = run.job.kv, run.table.matched
        assert kv is not None
        if kv.engine_id == self._owner.engine_id:
            self._copy(run, kv)
            return
        local = run.table.blocks[matched : run.digest.blocks]
        run.kv_bytes = len(local) * self._arena.block_bytes
        data = Notice(kind=NoticeKind.READ, key=kv.engine_request_id, kv_bytes=run.kv_bytes).pack()
        if not local:
            self._moves.tell(kv.engine_id, kv.params, data)
            self._fetched(run, "")
            return
        run.moving = Moving(
            engine_id=kv.engine_id,
            params=kv.params,
            remote=kv.block_ids[matched:],
            local=local,
            notice=data,
            refusal=partial(self._rules.why_stale, kv),
            on_end=partial(self._fetched, run),
        )
        self._moves.begin(run.moving, now_s, now_ms)

    def _copy(self, run: SimRun, kv: KvHandle) -> None:
        """Copy the blocks that the prefix cache lacks, for a handle of this engine."""
        matched, blocks = run.table.matched, run.digest.blocks
        pin = self._pins.get(kv.engine_request_id)
        source_blocks = pin.table.blocks[:blocks] if pin is not None else []
        if tuple(source_blocks) != tuple(kv.block_ids):
            error = "it has other blocks" if source_blocks else "it is held no more"
            self._fetched(run, error)
            return
        self._arena.copy(source_blocks[matched:], run.table.blocks[matched:blocks])
        self._drop(kv.engine_request_id)
        self._fetched(run, "")

    def _fetched(self, run: SimRun, error: str) -> None:
        del self._fetching[run.request_id]
        moving = run.moving
        if not error:
            run.transfer_ms = moving.duration_ms if moving is not None else 0.0
            self._bytes_fetched += run.kv_bytes
            self._end(run, None)
            return
        if moving is not None and not moving.is_settled:
            moving.blocks_to_release = self._blocks.detach(run.table, run.table.matched)
        self._blocks.close(run.table)
        run.kv_bytes = 0
        self._end(run, KvUnavailable(f"{run.request_id}: KV not read: {error}").to_wire())

    def _drop(self, key: str) -> bool:
        """Free a kept prompt; return False if it is unknown, as after an earlier release."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._blocks.close(pin.table)
        return pin is not None

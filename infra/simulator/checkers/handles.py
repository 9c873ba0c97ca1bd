"""Invariant 4: a KV handle is used once, in time and in one epoch, and its memory is exclusive.

While a transfer writes to memory, it is used for nothing else.
"""

from collections import Counter

from infra.simulator.cluster import Checker
from infra.simulator.machine.kv_exchange import KvMove, MoveKind
from schemas.records import KvHandle, Phase, Registration

Name = tuple[str, str]  # engine and job of a handle


class Handles(Checker):
    """Checks KV transfers against the handles in the log."""

    def __init__(self) -> None:
        self._handles: dict[Name, KvHandle] = {}
        self._read: Counter[Name] = Counter()
        self._written: Counter[Name] = Counter()
        self._epochs: dict[str, int] = {}
        self.moves = 0

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Note the handles and the epochs of workers."""
        if isinstance(record, Registration):
            self._epochs[record.member_id] = record.epoch
        elif isinstance(record, Phase) and record.kv is not None:
            self._handles[record.kv.engine_id, record.kv.engine_request_id] = record.kv

    def on_kv_move(self, move: KvMove) -> None:
        """Check the start or the end of a KV transfer."""
        handle, alive = move.handle, not (move.source.is_dead or move.target.is_dead)
        what = f"{move.kind.value} of {move.job_id}, {move.source.engine_id} to "
        what += move.target.engine_id
        if move.is_done:
            if not move.target.is_dead:
                self._check_memory(move, what)
            return
        self.moves += 1
        assert alive, f"{what}: with an engine that has ended"
        assert move.at_ms < handle.expires_at_ms, f"{what}: late"
        epoch = self._epochs.get(handle.worker_id, handle.worker_epoch)  # unknown: forged
        assert handle.worker_epoch == epoch, f"{what}: of another life"
        name = handle.engine_id, handle.engine_request_id
        if move.kind is MoveKind.READ or name in self._handles:  # else it is not in the log yet
            assert self._handles.get(name) == handle, f"{what}: by a handle that nobody gave out"
        used = self._read if move.kind is MoveKind.READ else self._written
        used[name] += 1
        assert used[name] == 1, f"{what}: used twice"

    def _check_memory(self, move: KvMove, what: str) -> None:
        """Check that the job has its memory to the end of the transfer."""
        assert move.into.blocks is not None, f"{what}: into memory that others may have"

"""Handing KV over: what a prefill job leaves for its peer, and what a decode job fetches from one.

Holds prompts' blocks until they are read or their time is up; checks handles, fetches the blocks
that the prefix cache lacks, retries once, and keeps blocks that a late transfer may still write to
out of use. Says what ended; the engine decides what then. Times are arguments.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import KvUnavailable, TriviumError
from schemas.records import KvHandle
from workers.kv.transfer import Fetch, FetchEnd, KvTransfer
from workers.llm.blocks import BlockManager
from workers.llm.sim_handles import HandleRules, Held, HeldKv
from workers.llm.sim_kv import KvArena
from workers.llm.sim_run import Run
from workers.llm.sim_settings import SimSettings

_log = logging.getLogger(__name__)
PeerMetadata = Callable[[str], bytes | None]
_TRIES_MAX = 2


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose engine this is."""

    worker_id: str
    worker_epoch: int
    engine_id: str


class Exchange:
    """Both ends of the hand-over, for one engine."""

    def __init__(
        self,
        settings: SimSettings,
        owner: Owner,
        blocks: BlockManager,
        arena: KvArena,
        transfer: KvTransfer | None,
        peer_metadata: PeerMetadata | None,
    ) -> None:
        self._settings, self._owner = settings, owner
        self._blocks, self._arena = blocks, arena
        self._transfer, self._peer_metadata = transfer, peer_metadata
        self._held, self._rules = HeldKv(), HandleRules(settings.block_size)
        self._fetching: dict[int, Run] = {}
        self._unsettled: dict[int, list[int]] = {}  # blocks that a given-up fetch may still write
        self._done: list[tuple[Run, bool]] = []
        self._serial = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.expired_total = 0
        self.failures_total = 0

    @property
    def fetching(self) -> int:
        return len(self._fetching)

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def busy(self) -> bool:
        """Peers or transfers wait for polls."""
        return bool(self._fetching or self._unsettled or self._held)

    def hold(self, run: Run, now_ms: int) -> KvHandle:
        """Keep a computed prompt for its peer; the table passes to the exchange."""
        self._serial += 1
        key = f"{run.request_id}-{self._serial:x}"
        release_at_ms = now_ms + self._settings.handle_ttl_ms
        self._held.hold(key, Held(run.request_id, run.table, release_at_ms))
        in_handle = self._transfer is not None and self._peer_metadata is None
        return KvHandle(
            worker_id=self._owner.worker_id,
            worker_epoch=self._owner.worker_epoch,
            engine_id=self._owner.engine_id,
            engine_request_id=key,
            tokens=run.prompt_tokens,
            block_size=self._settings.block_size,
            block_ids=tuple(run.table.blocks[: run.blocks_now]),
            expires_at_ms=release_at_ms - self._settings.handle_margin_ms,
            params=self._transfer.metadata() if self._transfer and in_handle else b"",
        )

    def release(self, request_id: str) -> bool:
        """Drop what is held for a request; whether there was anything."""
        keys = self._held.of_request(request_id)
        for key in keys:
            self._drop(key)
        return bool(keys)

    def refusal(self, run: Run, now_ms: int) -> TriviumError | None:
        """Mark a decode job's handle as used, or say why it must not be."""
        kv = run.job.kv
        assert kv is not None
        if self._transfer is None and kv.engine_id != self._owner.engine_id:
            return KvUnavailable(f"{kv.engine_request_id}: this engine has no KV transfer")
        error = self._rules.use(kv, run.prompt_tokens, now_ms)
        if error is None:
            self.saw(kv.worker_id, kv.worker_epoch, kv.engine_id)
        return error

    def set_peer_metadata(self, peer_metadata: PeerMetadata) -> None:
        """From now on handles leave the metadata out, since peers find it in the fleet."""
        self._peer_metadata = peer_metadata

    def saw(self, worker_id: str, epoch: int, engine_id: str) -> None:
        """A peer lives in this epoch; its earlier engine is forgotten, and KV of it refused."""
        gone = self._rules.saw(worker_id, epoch, engine_id)
        if gone is not None and self._transfer is not None:
            self._transfer.forget(gone)

    def begin(self, run: Run, now_s: float, now_ms: int) -> bool:
        """Find room and post the read; False when there is no room yet."""
        table = self._blocks.open(
            run.digest.chain, run.blocks_now, run.blocks_max(self._settings.block_size)
        )
        if table is None:
            return False
        run.table = table
        run.cached_tokens = table.matched * self._settings.block_size
        run.fetching_since_s = now_s
        self._post(run, now_ms)
        return True

    def abandon(self, run: Run) -> None:
        """The run no longer wants its fetch; its blocks are free once nothing can write to them."""
        self._done = [pair for pair in self._done if pair[0] is not run]
        for tag in [tag for tag, other in self._fetching.items() if other is run]:
            del self._fetching[tag]
            self._quarantine(tag, run)
        if not run.table.closed:
            self._blocks.close(run.table)

    def poll(self, now_s: float, now_ms: int) -> list[tuple[Run, bool]]:
        """Progress; the fetches that ended, and whether the KV is there."""
        for held in self._held.expired(now_ms):
            self.expired_total += 1
            self._blocks.close(held.table)
        ended, self._done = self._done, []
        if self._transfer is None:
            return ended
        polled = self._transfer.poll()
        for notice in polled.notices:
            size, _, key = notice.decode().partition(" ")
            self.bytes_sent += int(size) if self._drop(key) else 0
        for end in polled.ended:
            self._take_end(end, now_s, now_ms)
        ended += self._done
        self._done = []
        return ended

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()

    def _post(self, run: Run, now_ms: int) -> None:
        """Read what the prefix cache lacks; the producer learns of it either way."""
        kv, matched = run.job.kv, run.table.matched
        assert kv is not None
        is_own = kv.engine_id == self._owner.engine_id
        if now_ms >= kv.expires_at_ms or (is_own and not self._held.has(kv.engine_request_id)):
            self._give_up(run, "expired")
            return
        if is_own:
            self._copy(run, kv)
            self._done.append((run, True))
            return
        assert self._transfer is not None
        run.tries += 1
        self._serial += 1
        remote = kv.block_ids[matched:]
        run.kv_bytes = len(remote) * self._arena.block_bytes
        if remote:
            self._fetching[self._serial] = run
        else:
            self._done.append((run, True))
        found = self._peer_metadata(kv.engine_id) if self._peer_metadata else None
        self._transfer.fetch(
            Fetch(
                tag=self._serial,
                engine_id=kv.engine_id,
                card=found or kv.params,
                remote_blocks=remote,
                local_blocks=run.table.blocks[matched : run.blocks_now],
                notice=f"{run.kv_bytes} {kv.engine_request_id}".encode(),
                timeout_s=self._settings.transfer_timeout_ms / 1_000,
            )
        )

    def _copy(self, run: Run, kv: KvHandle) -> None:
        """A handle of this very engine: copy what the prefix cache lacks."""
        matched = run.table.matched
        ours, theirs = run.table.blocks[matched : run.blocks_now], list(kv.block_ids[matched:])
        self._arena.words[ours] = self._arena.words[theirs]
        self._drop(kv.engine_request_id)

    def _take_end(self, end: FetchEnd, now_s: float, now_ms: int) -> None:
        if end.settled and end.tag in self._unsettled:
            self._blocks.release(self._unsettled.pop(end.tag))
            return
        run = self._fetching.pop(end.tag, None)
        if run is None:
            return
        kv = run.job.kv
        assert kv is not None
        if not end.error and now_ms < kv.expires_at_ms:  # later, the blocks may have been others
            run.transfer_ms = (now_s - run.fetching_since_s) * 1_000
            self.bytes_received += run.kv_bytes
            self._done.append((run, True))
            return
        if end.settled and run.tries < _TRIES_MAX:
            self.failures_total += 1
            self._post(run, now_ms)
            return
        if not end.settled:
            self._quarantine(end.tag, run)
        self._give_up(run, end.error or "expired")

    def _give_up(self, run: Run, why: str) -> None:
        self.failures_total += 1
        _log.warning("request %s: KV not fetched: %s", run.request_id, why)
        self._blocks.close(run.table)
        run.kv_bytes = 0
        self._done.append((run, False))

    def _quarantine(self, tag: int, run: Run) -> None:
        """Blocks that may still be written to leave the table, but are not free."""
        self._unsettled[tag] = self._blocks.detach(run.table, run.table.matched)

    def _drop(self, key: str) -> bool:
        held = self._held.take(key)
        if held is not None:
            self._blocks.close(held.table)
        return held is not None

"""KV handles of the simulated engine: the KV behind them, and checks before their use.

Pure: time is an argument. Called by `exchange.py`.
"""

from dataclasses import dataclass

from schemas.errors import KvUnavailable, StaleEpoch, TriviumError
from schemas.records import KvHandle
from workers.llm.sim.blocks import BlockTable

_USED_MAX = 16_384  # handles remembered as used; far more than can be valid at once


@dataclass(slots=True, kw_only=True)
class EngineOwner:
    """The engine and its worker; the engine may outlive an epoch of the worker."""

    worker_id: str
    worker_epoch: int
    engine_id: str


@dataclass(slots=True)
class PinnedPrompt:
    """One prompt's KV, pinned until its peer has read it or it expires."""

    request_id: str
    table: BlockTable
    release_at_ms: int


class HandleRules:
    """Checks of handles: each is used once, before it expires, in its worker's latest epoch."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._used: dict[tuple[str, str], None] = {}
        self._epochs: dict[str, tuple[int, str]] = {}  # worker: latest epoch seen, and its engine

    def use(self, kv: KvHandle, prompt_tokens: int, now_ms: int) -> TriviumError | None:
        """Mark a handle of kept KV as used, or return why it must not be used."""
        blocks = -(-prompt_tokens // self._block_size)
        if kv.tokens != prompt_tokens or len(kv.block_ids) != blocks:
            return KvUnavailable(
                f"{kv.engine_request_id}: expected {prompt_tokens} tokens in {blocks} blocks, "
                f"found {kv.tokens} in {len(kv.block_ids)}"
            )
        return self._use(kv, now_ms)

    def use_promise(self, kv: KvHandle, prompt_tokens: int, now_ms: int) -> TriviumError | None:
        """Mark a promise to write KV as used, or return why it must not be used."""
        if kv.tokens != prompt_tokens or kv.block_ids:
            return KvUnavailable(
                f"{kv.engine_request_id}: expected a promise of {prompt_tokens} tokens, "
                f"found {kv.tokens} in {len(kv.block_ids)} blocks"
            )
        return self._use(kv, now_ms)

    def use_target(self, kv: KvHandle, prompt_tokens: int, now_ms: int) -> TriviumError | None:
        """Mark a handle of blocks to write to, or a promise of them, as used, or return why it
        must not be used.
        """
        promised = not kv.block_ids and 0 <= kv.tokens <= prompt_tokens
        misfit = None if promised else self.misfit(kv, prompt_tokens)
        return misfit or self._use(kv, now_ms)

    def misfit(self, target: KvHandle, prompt_tokens: int) -> TriviumError | None:
        """Return why a prompt cannot be written to these blocks; None if it can."""
        blocks, block_count = -(-prompt_tokens // self._block_size), len(target.block_ids)
        if block_count == blocks and not target.tokens % self._block_size:
            if 0 <= target.tokens <= prompt_tokens:
                return None
        return KvUnavailable(
            f"{target.engine_request_id}: expected {blocks} blocks for {prompt_tokens} tokens, "
            f"found {block_count}, of which {target.tokens} tokens are valid"
        )

    def stale(self, kv: KvHandle, now_ms: int) -> TriviumError | None:
        """Return why a handle has expired or is of a former epoch; None if it is valid."""
        if now_ms >= kv.expires_at_ms:
            return KvUnavailable(
                f"{kv.engine_request_id}: expired {now_ms - kv.expires_at_ms} ms ago"
            )
        latest, _ = self._epochs.get(kv.worker_id, (0, ""))
        if kv.worker_epoch < latest:
            return StaleEpoch(
                f"{kv.worker_id}: expected epoch {latest}, found KV of epoch {kv.worker_epoch}"
            )
        return None

    def why_stale(self, kv: KvHandle, now_ms: int) -> str:
        """Return the text of `stale`; "" for a valid handle."""
        error = self.stale(kv, now_ms)
        return str(error) if error is not None else ""

    def observe_epoch(self, worker_id: str, epoch: int, engine_id: str) -> str | None:
        """Note a worker's latest epoch; return the engine of its former one, to be dropped.

        Return "" if there was none, None if nothing changed. A worker that lost its lease may have
        the same engine again, but its former jobs are over.
        """
        latest, former_engine = self._epochs.get(worker_id, (0, ""))
        if epoch < latest or (epoch, engine_id) == (latest, former_engine):
            return None
        self._epochs[worker_id] = (epoch, engine_id)
        return former_engine

    def _use(self, kv: KvHandle, now_ms: int) -> TriviumError | None:
        if kv.block_size != self._block_size:
            return KvUnavailable(
                f"{kv.engine_request_id}: expected blocks of {self._block_size} tokens, "
                f"found {kv.block_size}"
            )
        key = (kv.engine_id, kv.engine_request_id)
        if key in self._used:
            return KvUnavailable(f"{kv.engine_request_id}: already used once")
        error = self.stale(kv, now_ms)
        if error is None:
            self._used[key] = None
            if len(self._used) > _USED_MAX:
                del self._used[next(iter(self._used))]
        return error

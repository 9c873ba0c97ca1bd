"""KV moves of the simulated engine that are in flight, with their retries, and its messages.

A failed move is retried on a new connection, after a pause that doubles each time, until it has no
tries left or must not be posted any more. Blocks that a late or abandoned move may still access are
kept until it has settled. `exchange.py`, `allocations.py` and `pushes.py` decide which blocks move.
Messages are NIXL notices: `read` and `wrote` arrive together with the bytes that they report, the
others alone. Times are arguments.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from schemas.records import KvHandle, WireError
from workers.kv.retries import Retries
from workers.kv.transfer import BlockMove, Direction, KvTransfer, MoveEnd
from workers.llm.engine import PeerMetadata
from workers.llm.sim.blocks import BlockManager
from workers.llm.sim.settings import SimSettings

_log = logging.getLogger(__name__)
_RETRY_S = 0.005  # pause before the second try; it doubles with every further one


class NoticeKind(StrEnum):
    """The event or request of a notice."""

    READ = "read"  # the sender has read `kv_bytes` of the receiver's blocks, and needs no more
    WANT = "want"  # decode has allocated: write to `target`
    WROTE = "wrote"  # prefill has written `kv_bytes`; all blocks of the prompt are valid
    UNWANTED = "unwanted"  # decode gave up: do not write, and send `dropped` to `target`
    DROPPED = "dropped"  # prefill will not write the receiver's blocks; `error` may be the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One notice about the request or handle `key`."""

    __pydantic_config__: ClassVar = ConfigDict(
        extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )
    kind: NoticeKind
    key: str
    kv_bytes: int = 0
    target: KvHandle | None = None
    error: WireError | None = None

    def pack(self) -> bytes:
        """Return the notice as JSON, for `unpack`."""
        return _NOTICES.dump_json(self)

    @classmethod
    def unpack(cls, data: bytes) -> "Notice":
        """Read a notice from JSON; raises ValueError if `pack` did not make it."""
        try:
            notice = _NOTICES.validate_json(data)
            if notice.target is None and notice.kind in (NoticeKind.WANT, NoticeKind.UNWANTED):
                raise ValueError("no target")
        except ValueError as error:  # pydantic's errors are ValueErrors too
            raise ValueError(f"notice: expected one of a simulated engine: {error}") from error
        return notice


_NOTICES = TypeAdapter(Notice)


def always(_now_ms: int) -> str:
    """Return "": the `refusal` of a move that may be posted at any time."""
    return ""


def ignore(_error: str) -> None:
    """Do nothing: the `on_end` of a move whose end has no effect."""


@dataclass(slots=True, kw_only=True, eq=False)
class Moving:
    """One move, over all its tries.

    `refusal` returns, for a time in ms, why the move must not be posted or its data not be used;
    "" if it may. `on_end` gets the error, or "", once, unless the move is abandoned first.
    `on_settled` gets it when nothing can access the blocks any more, in any case.
    """

    engine_id: str
    params: bytes  # the peer's card, if the fleet does not list it
    direction: Direction = Direction.READ
    remote: Sequence[int] = ()
    local: Sequence[int] = ()
    notice: bytes = b""
    refusal: Callable[[int], str] = always
    on_end: Callable[[str], None] = ignore
    on_settled: Callable[[str], None] = ignore
    blocks_to_release: Sequence[int] = ()  # released when the move has settled
    since_s: float = 0.0
    duration_ms: float = 0.0
    is_over: bool = False  # `on_end` was called, or the move was abandoned
    is_settled: bool = False


class Moves:
    """All moves of one engine; without `peer_metadata`, handles contain the peers' cards."""

    peer_metadata: PeerMetadata | None = None

    def __init__(self, settings: SimSettings, blocks: BlockManager, transfer: KvTransfer) -> None:
        self.transfer = transfer
        self._settings, self._blocks = settings, blocks
        self._in_flight: dict[int, Moving] = {}
        self._retries = Retries[Moving](settings.transfer_tries_max, _RETRY_S)
        self._serial = 0
        self._now_s = 0.0
        self.failures_total = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a move is in flight or waits for its next try."""
        return bool(self._in_flight or self._retries)

    def begin(self, moving: Moving, now_s: float, now_ms: int) -> None:
        """Post a move; if it is refused, it ends at once."""
        moving.since_s = now_s
        self._post(moving, now_ms)

    def tell(self, engine_id: str, params: bytes, notice: bytes) -> None:
        """Send a notice to a peer; with an empty one, only connect."""
        self._post(Moving(engine_id=engine_id, params=params, notice=notice), 0)

    def abandon(self, moving: Moving, blocks: Sequence[int]) -> None:
        """Stop waiting for a move; release these blocks once it has settled."""
        assert not moving.is_settled
        moving.is_over, moving.blocks_to_release = True, blocks
        if moving in self._retries:
            self._settle(moving, "abandoned")

    def poll(self, now_s: float, now_ms: int) -> list[Notice]:
        """Make progress, and return the notices from peers."""
        self._now_s = now_s
        poll_result = self.transfer.poll()
        for end in poll_result.ends:
            self._take(end, now_ms)
        for moving in self._retries.due(now_s):
            self._post(moving, now_ms)
        notices = []
        for data in poll_result.notices:
            try:
                notices.append(Notice.unpack(data))
            except ValueError as error:
                _log.warning("%s", error)
        return notices

    def _post(self, moving: Moving, now_ms: int) -> None:
        refusal = moving.refusal(now_ms)
        if refusal:
            self._settle(moving, refusal)
            return
        self._serial += 1
        self._in_flight[self._serial] = moving
        metadata = self.peer_metadata(moving.engine_id) if self.peer_metadata else None
        self.transfer.move(
            BlockMove(
                tag=self._serial,
                engine_id=moving.engine_id,
                card=metadata or moving.params,
                direction=moving.direction,
                remote_blocks=moving.remote,
                local_blocks=moving.local,
                notice=moving.notice,
                timeout_s=self._settings.transfer_timeout_ms / 1_000,
            )
        )

    def _take(self, end: MoveEnd, now_ms: int) -> None:
        moving = self._in_flight[end.tag]
        self.failures_total += bool(end.error)
        if not end.settled:
            self._end(moving, end.error)
            return
        del self._in_flight[end.tag]
        error = end.error
        if error and not moving.is_over and self._retries.record_failure(moving, self._now_s):
            return
        if not error and moving.direction is Direction.READ:
            error = moving.refusal(now_ms)  # the blocks may have been reused meanwhile
        self._settle(moving, error)

    def _end(self, moving: Moving, error: str) -> None:
        if moving.is_over:
            return
        moving.is_over = True
        moving.duration_ms = (self._now_s - moving.since_s) * 1_000
        if error:
            _log.warning("KV %s, engine %s: %s", moving.direction, moving.engine_id, error)
        moving.on_end(error)

    def _settle(self, moving: Moving, error: str) -> None:
        moving.is_settled = True
        self._retries.forget(moving)
        self._end(moving, error)
        self._blocks.release(moving.blocks_to_release)
        moving.blocks_to_release = ()
        moving.on_settled(error)

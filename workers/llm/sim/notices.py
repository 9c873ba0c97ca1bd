"""The messages between simulated engines, sent as NIXL notices.

`read` and `wrote` arrive together with the bytes that they report; the others arrive alone. Pure.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from schemas.records import KvHandle, WireError


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

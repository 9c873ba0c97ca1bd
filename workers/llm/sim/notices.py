"""What simulated engines tell each other besides the KV itself, as NIXL notices.

`read` and `wrote` arrive together with the bytes that they are about; the others come alone. Pure.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from schemas.records import KvHandle, WireError


class NoticeKind(StrEnum):
    """What happened, or is asked."""

    READ = "read"  # the reader has `kv_bytes` of the receiver's blocks, and needs no more
    WANT = "want"  # decode has allocated: write to `target`
    WROTE = "wrote"  # prefill has written `kv_bytes`; all blocks of the prompt are valid
    UNWANTED = "unwanted"  # decode gave up: write no more, and say `dropped` to `target`
    DROPPED = "dropped"  # prefill will not touch the receiver's blocks; `error` says why, if any


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
        """JSON, as `unpack` reads it."""
        return _NOTICES.dump_json(self)

    @classmethod
    def unpack(cls, data: bytes) -> "Notice":
        """Raises ValueError for anything that `pack` did not make."""
        try:
            notice = _NOTICES.validate_json(data)
            if notice.target is None and notice.kind in (NoticeKind.WANT, NoticeKind.UNWANTED):
                raise ValueError("no target")
        except ValueError as error:  # pydantic's, too
            raise ValueError(f"notice: expected one of a simulated engine: {error}") from error
        return notice


_NOTICES = TypeAdapter(Notice)

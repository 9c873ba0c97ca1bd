"""What simulated engines tell each other besides the KV itself, as NIXL notices.

`read` and `wrote` arrive together with the bytes that they are about; the others come alone. Pure.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

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

    kind: NoticeKind
    key: str
    kv_bytes: int = 0
    target: KvHandle | None = None
    error: WireError | None = None

    def pack(self) -> bytes:
        """JSON, as `unpack` reads it."""
        fields: dict[str, Any] = {"kind": self.kind, "key": self.key, "kv_bytes": self.kv_bytes}
        if self.target is not None:
            fields["target"] = {**asdict(self.target), "params": self.target.params.hex()}
        if self.error is not None:
            fields["error"] = asdict(self.error)
        return json.dumps(fields).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Notice":
        """Raises ValueError for anything that `pack` did not make."""
        try:
            fields: dict[str, Any] = json.loads(data)
            fields["kind"] = NoticeKind(fields["kind"])
            if (target := fields.get("target")) is not None:
                target["params"] = bytes.fromhex(target["params"])
                fields["target"] = KvHandle(**target)
            if (error := fields.get("error")) is not None:
                fields["error"] = WireError(**error)
            elif target is None and fields["kind"] in (NoticeKind.WANT, NoticeKind.UNWANTED):
                raise ValueError("no target")
            return cls(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"notice: expected one of a simulated engine: {error!r}") from error

"""The id of a response: `resp_`, its request, and the position of its record on the log.

The form is `resp_<request>_<position>`. The position is in base64 with a signature (HMAC-SHA256)
for the API key that created it. So any gateway finds the record, and no caller can make a gateway
read another tenant's record.
"""

import base64
import binascii
import hmac
import struct
from typing import NamedTuple

from schemas.errors import NotFound
from streams.calls.ids import LENGTH, RESPONSE_PREFIX

_PLACE = struct.Struct(">HQ")
_SIGNATURE_BYTES = 14  # with the position, 32 characters in base64
NAME_CHARS = 1 + LENGTH + 1 + 32  # of an id without its prefix
_CHARS = len(RESPONSE_PREFIX) + NAME_CHARS


class RecordPosition(NamedTuple):
    """The position of a record on topic `responses`."""

    partition: int
    offset: int


class ResponseIds:
    """Makes and parses response ids with the deployment's key."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def name(self, request_id: str, tenant: str, position: RecordPosition | None) -> str:
        """Return the id of a response; without a position, its record cannot be found again."""
        if position is None:
            return RESPONSE_PREFIX + request_id
        packed = _PLACE.pack(*position)
        signed = self._sign(request_id, tenant, packed) + packed
        return f"{RESPONSE_PREFIX}{request_id}_{base64.urlsafe_b64encode(signed).decode()}"

    def parse(self, response_id: str, tenant: str) -> tuple[str, RecordPosition]:
        """Parse an id of this caller into request id and position; raises NotFound."""
        try:
            if len(response_id) != _CHARS or not response_id.startswith(RESPONSE_PREFIX):
                raise ValueError("no id of a stored response")
            request_id, _, encoded = response_id.removeprefix(RESPONSE_PREFIX).partition("_")
            raw = base64.b64decode(encoded.encode(), b"-_", validate=True)
            signature, packed = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
            if not hmac.compare_digest(signature, self._sign(request_id, tenant, packed)):
                raise ValueError("another signature")
            return request_id, RecordPosition(*_PLACE.unpack(packed))
        except (ValueError, struct.error, binascii.Error) as error:
            raise NotFound(
                f"response {response_id[:80]!r}: not known; expected the id of a stored response "
                "that this deployment has made for this API key"
            ) from error

    def _sign(self, request_id: str, tenant: str, packed: bytes) -> bytes:
        message = b"response\0%b\0%b\0%b" % (tenant.encode(), request_id.encode(), packed)
        return hmac.digest(self._key, message, "sha256")[:_SIGNATURE_BYTES]

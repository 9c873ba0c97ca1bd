"""The id of a response: `resp_`, its request, and where on the log its record lies.

`resp_<request>_<place>`, the place in base64 with a signature (HMAC-SHA256), which is believed for
the API key that it was made for. So any gateway finds the record, and nobody makes one read what is
not the caller's.
"""

import base64
import binascii
import hmac
import struct
from typing import NamedTuple

from schemas.errors import NotFound
from streams.gateway.ids import LENGTH, RESPONSE_PREFIX

_PLACE = struct.Struct(">HQ")
_SIGNATURE_BYTES = 14  # with the place, 32 characters
_CHARS = len(RESPONSE_PREFIX) + 1 + LENGTH + 1 + 32


class RecordPosition(NamedTuple):
    """Where a record lies on topic `responses`."""

    partition: int
    offset: int


class ResponseIds:
    """Makes and reads ids, with the key of the deployment."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def name(self, request_id: str, tenant: str, position: RecordPosition | None) -> str:
        """The id; without a place nobody finds it again."""
        if position is None:
            return RESPONSE_PREFIX + request_id
        packed = _PLACE.pack(*position)
        signed = self._sign(request_id, tenant, packed) + packed
        return f"{RESPONSE_PREFIX}{request_id}_{base64.urlsafe_b64encode(signed).decode()}"

    def parse(self, response_id: str, tenant: str) -> tuple[str, RecordPosition]:
        """Request and place in an id of this caller; raises NotFound."""
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

"""A file that comes as a form, within limits; large files wait on disk.

Web pages may send forms without a preflight request. But browsers add the page's `Origin`, by which
`entry.py` refuses foreign pages.
"""

import contextlib
from collections.abc import AsyncIterator

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from schemas.errors import (
    BodyTooLarge,
    Cancelled,
    InvalidRequest,
    UnsupportedMedia,
)
from streams.calls.in_flight import FairShare

FORM = b"multipart/form-data"
FIELDS_MAX = 8
_AROUND_BYTES = 64 << 10  # of a form besides its file


class Uploads:
    """Reads forms, a limited number at once."""

    def __init__(self, *, bytes_max: int, share: FairShare) -> None:
        self.bytes_max = bytes_max
        self._share = share

    @contextlib.asynccontextmanager
    async def form(self, request: Request, tenant: str) -> AsyncIterator[FormData]:
        """Yield the fields of a form; its file is deleted afterwards.

        Raises UnsupportedMedia, TooManyRequests, BodyTooLarge as soon as the size is known,
        Cancelled if the client disconnects, and InvalidRequest if the body is no form.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != FORM.decode():
            raise UnsupportedMedia(
                f"Content-Type: expected multipart/form-data, found {kind[:60]!r}"
            )
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and len(announced) < 20:
            self._check(int(announced))
        self._share.take(tenant, "uploads")
        try:
            bounded = Request(request.scope, self._limit_body(request.receive))
            try:
                form = await bounded.form(max_files=1, max_fields=FIELDS_MAX)
            except HTTPException as error:
                raise InvalidRequest(f"the form cannot be read: {error.detail}") from error
            except ClientDisconnect as error:
                raise Cancelled("the client hung up before its file was complete") from error
            try:
                yield form
            finally:
                await form.close()
        finally:
            self._share.give_back(tenant)

    def _limit_body(self, receive: Receive) -> Receive:
        received_bytes = 0

        async def receive_and_count() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            self._check(received_bytes)
            return message

        return receive_and_count

    def _check(self, size: int) -> None:
        if size > self.bytes_max + _AROUND_BYTES:
            raise BodyTooLarge(f"file: expected at most {self.bytes_max} bytes, found more")


async def parts_of(file: UploadFile, part_bytes: int) -> AsyncIterator[bytes]:
    """Yield the bytes of an uploaded file in parts of at most `part_bytes`."""
    while data := await file.read(part_bytes):
        yield data

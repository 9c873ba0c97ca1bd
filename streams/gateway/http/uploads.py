"""A file that comes as a form, within bounds; what is large of it waits on disk.

A web page may send forms without asking; the `Origin` that browsers add keeps foreign ones out
(`entry.py`), since it is not asked for a form's sake alone.
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
from streams.gateway.fair_share import FairShare

FORM = b"multipart/form-data"
FIELDS_MAX = 8
_AROUND_BYTES = 64 << 10  # of a form beside its file


class Uploads:
    """Reads forms, a few at once."""

    def __init__(self, *, bytes_max: int, share: FairShare) -> None:
        self.bytes_max = bytes_max
        self._share = share

    @contextlib.asynccontextmanager
    async def form(self, request: Request, tenant: str) -> AsyncIterator[FormData]:
        """Its fields; the file is gone afterwards.

        Raises UnsupportedMedia, TooManyRequests, BodyTooLarge as soon as that is known, Cancelled
        where the client hangs up half-way, and InvalidRequest for what is no form.
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
    """What an uploaded file holds, piece by piece."""
    while data := await file.read(part_bytes):
        yield data

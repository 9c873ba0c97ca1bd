"""Writing an answer: as server-sent events while it comes, or whole when it is there.

One write per call and batch of frames. A stream's response begins with its first token, so that
whatever fails before it has a status of its own.
"""

from starlette.types import Send

from schemas.errors import TriviumError
from streams.gateway.http.exchange import HeaderList, send_whole
from streams.gateway.stream.answers import end_error, placement_headers
from streams.gateway.stream.chunks import KEEPALIVE, ChunkWriter, error_event, whole_answer
from streams.gateway.stream.hub import Call

COMPLETED, GONE = "completed", "client_gone"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies not to hold events back
)


def _names(call: Call) -> HeaderList:
    """Whose answer it is, and where it is computed as far as that is known by now."""
    parent_id = call.key.parent_id.encode()
    names = [
        (b"x-request-id", parent_id),
        (b"x-session-id", call.key.session_id.encode()),
        (b"x-trivium-request-id", parent_id),
    ]
    for stream in call.streams:
        if stream.start is not None or stream.end is not None:
            return names + placement_headers(stream.start, stream.end)
    return names


def _error(call: Call) -> TriviumError | None:
    if call.failure is None and call.bad_end is not None:
        return end_error(call.bad_end)
    return call.failure


async def write_stream(call: Call, writer: ChunkWriter, send: Send) -> str:
    """Write events until the answer is whole; returns the outcome.

    Raises the error that ended the call if nothing was written yet.
    """
    started = False
    while True:
        if not call.is_changed:
            await call.change()
        call.is_changed = False
        if call.gone:
            return GONE
        error = _error(call)
        if error is not None and not started:
            raise error
        last = error is not None or not call.open
        chunk = writer.drain()
        if error is not None:
            chunk += error_event(error)
        elif last:
            chunk += writer.closing()
        elif not chunk:
            if not call.keepalive:
                continue
            chunk = KEEPALIVE
        call.keepalive = False
        if not started:
            started = True
            headers = [*_STREAM_HEADERS, *_names(call)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": chunk, "more_body": not last})
        if last:
            return COMPLETED if error is None else error.code


async def write_whole(call: Call, send: Send) -> str:
    """Write the answer when it is whole; returns the outcome, raises the error that ended it."""
    while call.open and not call.gone and (error := _error(call)) is None:
        await call.change()
    if call.gone:
        return GONE
    if (error := _error(call)) is not None:
        raise error
    await send_whole(send, 200, whole_answer(call.key, call.streams), _names(call))
    return COMPLETED

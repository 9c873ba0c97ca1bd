"""Writing an answer: as server-sent events while it comes, or whole when it is there.

One write per call and batch of frames. A stream's response begins with its first token, so that
whatever fails before it has a status of its own.
"""

from schemas.errors import TriviumError
from streams.gateway.http.exchange import Exchange, HeaderList
from streams.gateway.stream.answers import end_error, placement_headers
from streams.gateway.stream.chunks import KEEPALIVE, ChunkWriter, error_event, whole_answer
from streams.gateway.stream.hub import Call

COMPLETED, CLIENT_GONE = "completed", "client_gone"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies not to hold events back
)


def _reply_headers(call: Call) -> HeaderList:
    """Whose answer it is, and where it is computed as far as that is known by now."""
    parent_id = call.key.parent_id.encode()
    headers = [
        (b"x-request-id", parent_id),
        (b"x-session-id", call.key.session_id.encode()),
        (b"x-trivium-request-id", parent_id),
    ]
    for stream in call.streams:
        if stream.start is not None or stream.end is not None:
            return headers + placement_headers(stream.start, stream.end)
    return headers


def _error(call: Call) -> TriviumError | None:
    if call.failure is None and call.failed_end is not None:
        return end_error(call.failed_end)
    return call.failure


async def write_stream(exchange: Exchange, call: Call, writer: ChunkWriter) -> str:
    """Write events until the answer is whole; returns the outcome.

    Raises the error that ended the call if nothing was written yet.
    """
    send, started = exchange.send, False
    while True:
        if not call.is_changed:
            await call.next_change()
        call.is_changed = False
        if call.client_gone:
            return CLIENT_GONE
        error = _error(call)
        if error is not None and not started:
            raise error
        last = error is not None or not call.open_streams
        chunk = writer.drain()
        if error is not None:
            chunk += error_event(error)
        elif last:
            chunk += writer.closing()
        elif not chunk:
            if not call.keepalive_due:
                continue
            chunk = KEEPALIVE
        call.keepalive_due = False
        if not started:
            started = True
            headers = [*_STREAM_HEADERS, *_reply_headers(call)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": chunk, "more_body": not last})
        if last:
            return COMPLETED if error is None else error.code


async def write_whole(exchange: Exchange, call: Call) -> str:
    """Write the answer when it is whole; returns the outcome, raises the error that ended it."""
    while call.open_streams and not call.client_gone and (error := _error(call)) is None:
        await call.next_change()
    if call.client_gone:
        return CLIENT_GONE
    if (error := _error(call)) is not None:
        raise error
    await exchange.send_whole(whole_answer(call.key, call.streams), _reply_headers(call))
    return COMPLETED

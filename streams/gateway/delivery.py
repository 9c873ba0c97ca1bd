"""Writing an answer: as server-sent events while it comes, or whole when it is there.

One write per call and batch of frames. A stream's response begins with its first token, so that
whatever fails before it has a status of its own.
"""

from starlette.types import Send

from schemas.errors import TriviumError
from streams.gateway.answers import end_error, placement
from streams.gateway.chunks import KEEPALIVE, ChunkWriter, error_event, whole_answer
from streams.gateway.http import HeaderList, send_whole
from streams.gateway.hub import Call

COMPLETED, GONE = "completed", "client_gone"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies not to hold events back
)


def _names(call: Call) -> HeaderList:
    return [
        (b"x-request-id", call.key.parent_id.encode()),
        (b"x-session-id", call.key.session_id.encode()),
    ]


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
    end = call.streams[-1].end
    assert end is not None
    where = placement(call.key, end)
    headers = [
        *_names(call),
        (b"x-trivium-mode", where["mode"].encode()),
        (b"x-trivium-prefill-worker", where["prefill_worker"].encode()),
        (b"x-trivium-decode-worker", where["decode_worker"].encode()),
    ]
    await send_whole(send, 200, whole_answer(call.key, call.streams), headers)
    return COMPLETED

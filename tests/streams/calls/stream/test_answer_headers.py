"""Headers of an answer: where it was computed, as far as that is known."""

from dataclasses import replace
from typing import Any

from schemas.records import Mode, Orchestration, Request, StreamStart
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat, frame, stream_end
from tests.streams.gateway.streamed_call import StreamedCall, streamed_call
from tests.waits import until

WHERE = ("mode", "orchestration", "prefill-worker", "decode-worker")


async def streamed(*starts: Any) -> StreamedCall:
    """A stream whose first frame tells these starts (changes of `start`)."""
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        await gateway.log.wait_sent(1)
        (request,) = gateway.log.requests
        start_records = [start(request.request_id, **changes) for changes in starts]
        await gateway.log.push(replace(frame(request.request_id, ["a"]), starts=start_records))
        await until(lambda: bool(stream.writes))
        end = stream_end(request.request_id, ["a"])
        await gateway.log.push(frame(request.request_id, [], end=end))
        await until(lambda: stream.over)
    assert stream.headers["x-trivium-request-id"] == request.request_id
    return stream


def start(request_id: str, **changes: Any) -> StreamStart:
    """What a decode worker tells of a remote placement."""
    base = StreamStart(
        request_id=request_id,
        attempt=1,
        mode=Mode.REMOTE,
        orchestration=Orchestration.CONCURRENT,
        prefill_worker="prefill-1",
        decode_worker="decode-1",
    )
    return replace(base, **changes)


def where(headers: Any) -> list[str | None]:
    """The values of the headers of WHERE."""
    return [headers.get(f"x-trivium-{name}") for name in WHERE]


async def test_stream_headers_show_placement_of_first_frame() -> None:
    stream = await streamed({})
    assert where(stream.headers) == ["remote", "concurrent", "prefill-1", "decode-1"]


async def test_stream_headers_omit_unknown_placement() -> None:
    assert where((await streamed()).headers) == [None] * 4
    stream = await streamed({"decode_worker": "", "orchestration": Orchestration.PREFILL_FIRST})
    assert where(stream.headers) == ["remote", "prefill_first", "prefill-1", None]
    local = {"mode": Mode.LOCAL, "orchestration": Orchestration.NONE, "prefill_worker": ""}
    assert where((await streamed(local)).headers) == ["local", None, None, "decode-1"]


async def test_stream_headers_prefer_latest_attempt_and_decode_worker() -> None:
    prefill, decode = {"decode_worker": ""}, {"decode_worker": "decode-2"}
    assert where((await streamed(prefill, decode)).headers)[3] == "decode-2"
    assert where((await streamed(decode, prefill)).headers)[3] == "decode-2"
    assert where((await streamed(decode | {"attempt": 2}, {})).headers)[3] == "decode-2"


async def test_answer_headers_show_end_and_orchestration() -> None:
    gateway = InProcessGateway()

    def answer(request: Request) -> None:
        end = stream_end(request.request_id, ["a"], attempt=2)
        start_records = [start(request.request_id, attempt=2, decode_worker="")]
        token_frame = frame(request.request_id, ["a"], attempt=2, end=end)
        gateway.log.hub.apply(replace(token_frame, starts=start_records), 0.0)

    gateway.log.on_request = answer
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=chat())
    assert where(response.headers) == ["remote", "concurrent", "prefill-1", "decode-1"]
    (request,) = gateway.log.requests
    assert response.headers["x-trivium-request-id"] == request.request_id

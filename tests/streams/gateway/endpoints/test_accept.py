"""Headers: where an answer was computed, as far as that is known, and weights of a request."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.records import Mode, Orchestration, OutcomeKind, Request, StreamStart
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat, ended, frame
from tests.streams.gateway.streamed_call import StreamedCall, streamed_call
from tests.waiting import until

WHERE = ("mode", "orchestration", "prefill-worker", "decode-worker")


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


async def streamed(*starts: Any) -> StreamedCall:
    """A stream whose first frame tells these starts (changes of `start`)."""
    gateway = InProcessGateway()
    async with streamed_call(gateway, chat(stream=True)) as stream:
        await gateway.log.wait_sent(1)
        (request,) = gateway.log.requests
        told = [start(request.request_id, **changes) for changes in starts]
        await gateway.log.push(replace(frame(request.request_id, ["a"]), starts=told))
        await until(lambda: bool(stream.writes))
        end = ended(request.request_id, ["a"])
        await gateway.log.push(frame(request.request_id, [], end=end))
        await until(lambda: stream.over)
    assert stream.headers["x-trivium-request-id"] == request.request_id
    return stream


async def test_a_stream_tells_what_its_first_frame_knew() -> None:
    stream = await streamed({})
    assert where(stream.headers) == ["remote", "concurrent", "prefill-1", "decode-1"]


async def test_what_is_not_known_with_the_first_token_is_left_out() -> None:
    assert where((await streamed()).headers) == [None] * 4
    stream = await streamed({"decode_worker": "", "orchestration": Orchestration.PREFILL_FIRST})
    assert where(stream.headers) == ["remote", "prefill_first", "prefill-1", None]
    local = {"mode": Mode.LOCAL, "orchestration": Orchestration.NONE, "prefill_worker": ""}
    assert where((await streamed(local)).headers) == ["local", None, None, "decode-1"]


async def test_the_highest_attempt_and_its_decode_worker_count() -> None:
    prefill, decode = {"decode_worker": ""}, {"decode_worker": "decode-2"}
    assert where((await streamed(prefill, decode)).headers)[3] == "decode-2"
    assert where((await streamed(decode, prefill)).headers)[3] == "decode-2"
    assert where((await streamed(decode | {"attempt": 2}, {})).headers)[3] == "decode-2"


async def test_a_whole_answer_tells_the_end_and_its_orchestration() -> None:
    gateway = InProcessGateway()

    def answer(request: Request) -> None:
        end = ended(request.request_id, ["a"], attempt=2)
        told = [start(request.request_id, attempt=2, decode_worker="")]
        one = frame(request.request_id, ["a"], attempt=2, end=end)
        gateway.log.hub.apply(replace(one, starts=told), 0.0)

    gateway.log.on_request = answer
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=chat())
    assert where(response.headers) == ["remote", "concurrent", "prefill-1", "decode-1"]
    (request,) = gateway.log.requests
    assert response.headers["x-trivium-request-id"] == request.request_id


async def test_an_error_has_the_id_only_if_the_request_is_on_the_log() -> None:
    gateway = InProcessGateway()
    gateway.answer_with(kind=OutcomeKind.EXPIRED)
    async with gateway.client() as client:
        expired = await client.post("/v1/chat/completions", json=chat())
        refused = await client.post("/v1/chat/completions", json=chat(temperature=9))
    (request,) = gateway.log.requests
    assert expired.status_code == 504
    assert expired.headers["x-trivium-request-id"] == request.request_id
    assert refused.status_code == 400
    assert "x-trivium-request-id" not in refused.headers


@pytest.mark.parametrize(
    ("header", "weights"),
    [
        (None, (-1.0, -1.0)),
        ("ttft=0.7,tpot=0.3", (0.7, 0.3)),
        (" TPOT = 2 , ttft=1e-1", (0.1, 2.0)),
        ("ttft=1", (1.0, 0.0)),
        ("ttft=0,tpot=1", (0.0, 1.0)),
    ],
)
async def test_weights_reach_the_record(header: str | None, weights: tuple[float, float]) -> None:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    headers = {} if header is None else {"x_trivium_weights": header}
    assert (await call(gateway, chat(n=2), **headers))[0] == 200
    assert [(r.w_ttft, r.w_tpot) for r in gateway.log.requests] == [weights] * 2


@pytest.mark.parametrize(
    "header",
    ["", "0.7", "ttft", "ttft=x", "ttft=-1", "ttft=nan", "ttft=inf", "ttft=0,tpot=0", "tbt=1"]
    + ["ttft=1,ttft=2", "ttft=1;tpot=2", "ttft=1,"],
)
async def test_bad_weights_are_refused_with_what_was_expected(header: str) -> None:
    gateway = InProcessGateway()
    status, answer = await call(gateway, chat(), x_trivium_weights=header)
    assert status == 400
    assert answer["error"]["param"] == "x-trivium-weights"
    assert "expected ttft=NUMBER,tpot=NUMBER" in answer["error"]["message"]
    assert f"found {header!r}" in answer["error"]["message"]
    assert not gateway.log.sent


@pytest.mark.parametrize(
    ("field", "headers", "expected"),
    [
        (None, {}, ("", "")),
        (None, {"x_trivium_policy": " Replica "}, ("replica", "")),
        (None, {"x_trivium_orchestration": "concurrent"}, ("", "concurrent")),
        ({"policy": "static", "orchestration": "auto"}, {}, ("static", "auto")),
        ({"policy": "static"}, {"x_trivium_policy": "learned"}, ("static", "")),
    ],
)
async def test_wishes_reach_the_record(
    field: Any, headers: dict[str, str], expected: tuple[str, str]
) -> None:
    """A header or a field chooses policy and orchestration; the field counts (issue 10, 2)."""
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    assert (await call(gateway, chat(n=2, trivium=field), **headers))[0] == 200
    assert [(r.policy, r.orchestration) for r in gateway.log.requests] == [expected] * 2


@pytest.mark.parametrize(
    ("field", "headers", "param"),
    [
        ({}, {"x_trivium_policy": "fastest"}, "x-trivium-policy"),
        ({}, {"x_trivium_orchestration": "none"}, "x-trivium-orchestration"),
        ({"policy": "fastest"}, {}, "trivium.policy"),
        ({"orchestration": ["auto"]}, {}, "trivium.orchestration"),
        ({"prefill": "first"}, {}, "trivium.prefill"),
        ("learned", {}, "trivium"),
    ],
)
async def test_unknown_wishes_are_refused(field: Any, headers: dict[str, str], param: str) -> None:
    """Nothing misspelt is silently something else (issue 10, 2)."""
    gateway = InProcessGateway()
    status, answer = await call(gateway, chat(trivium=field), **headers)
    assert (status, answer["error"]["param"]) == (400, param)
    assert not gateway.log.sent

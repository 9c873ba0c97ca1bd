"""What gateways read from the log, with fields as nobody means them: frames, turns, the fleet.
Calls end, and nothing ends a gateway."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from aiokafka import ConsumerRecord
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import RecordError
from schemas.fleet import FleetView
from schemas.records import MemberKind, OutcomeKind, Request, TokenFrame
from schemas.settings import LogSettings
from streams.calls.ids import Conversations
from streams.calls.log.tokens import decode_frame
from streams.calls.log.turns import TurnTopic
from tests.fuzz.strategies import CODEC, examples, record_bytes
from tests.loop_stalls import unstalled
from tests.schemas.examples import instances
from tests.streams.gateway.in_process import InProcessGateway
from tests.streams.gateway.samples import chat, events_of, frame, stream_end

MINE = "the call's own stream"  # its id is known when it is sent
NUMBERS = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 2**31 - 1])
FLOATS = st.sampled_from([float("nan"), float("inf"), float("-inf"), -1e308, 0.5])
ENDS = st.builds(
    dataclasses.replace,
    instances("trivium.StreamEnd"),
    request_id=st.just(MINE),
    attempt=NUMBERS,
    seq=NUMBERS,
    chars=NUMBERS,
    kind=st.sampled_from(OutcomeKind),
)
STARTS = st.builds(
    dataclasses.replace, instances("trivium.StreamStart"), request_id=st.just(MINE), attempt=NUMBERS
)
TOPS = st.builds(dataclasses.replace, instances("trivium.TokenLogprob"), logprob=FLOATS)
LOGPROBS = st.builds(
    dataclasses.replace,
    instances("trivium.StreamLogprobs"),
    request_id=st.just(MINE),
    attempt=NUMBERS,
    first_seq=NUMBERS,
    tokens=st.lists(TOPS, max_size=3),
)


def record_of(value: bytes | None) -> ConsumerRecord:
    size = len(value or b"")
    return ConsumerRecord("tokens", 0, 0, 0, 0, b"k", value, None, 1, size, ())


@st.composite
def frames(draw: st.DrawFn) -> TokenFrame:
    """Rows of one stream and of others, of equal columns mostly."""
    rows = draw(st.integers(0, 4))

    def column(strategy: st.SearchStrategy[Any]) -> Sequence[Any]:
        return draw(st.lists(strategy, min_size=rows, max_size=rows))

    counts = column(st.integers(0, 3))
    return TokenFrame(
        worker_id="w",
        at_ms=draw(st.sampled_from([0, -(2**63), 2**63 - 1])),
        request_ids=column(st.sampled_from([MINE, MINE, "", "another"])),
        attempts=column(NUMBERS),
        first_seqs=column(NUMBERS),
        first_chars=column(NUMBERS),
        token_counts=draw(st.just(counts) | st.lists(NUMBERS, max_size=4)),
        token_ids=draw(
            st.lists(st.integers(-(2**31), 2**31 - 1), min_size=sum(counts), max_size=sum(counts))
        ),
        texts=column(st.text(max_size=3)),
        logprobs=draw(st.lists(LOGPROBS, max_size=2)),
        ends=draw(st.lists(ENDS, max_size=1)),
        starts=draw(st.lists(STARTS, max_size=2)),
    )


def with_request_id(token_frame: TokenFrame, request_id: str) -> TokenFrame:
    """The same frame, with rows of this request in place of `MINE`."""

    def with_id(record: Any) -> Any:
        return dataclasses.replace(record, request_id=request_id)

    return dataclasses.replace(
        token_frame,
        request_ids=[request_id if name == MINE else name for name in token_frame.request_ids],
        logprobs=[with_id(row) for row in token_frame.logprobs],
        ends=[with_id(end) for end in token_frame.ends],
        starts=[with_id(start) for start in token_frame.starts],
    )


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@examples(50, fuzz_factor=3)
@given(
    st.lists(frames(), max_size=4),
    st.fixed_dictionaries(
        {"stream": st.booleans()},
        optional={"logprobs": st.just(True), "return_token_ids": st.just(True)},
    ),
)
async def test_gateway_call_ends_despite_forged_frames(
    token_frames: list[TokenFrame], fields: dict[str, Any]
) -> None:
    gateway = InProcessGateway()

    def answer(request: Request) -> None:
        now_s = asyncio.get_running_loop().time()
        last = stream_end(request.request_id, attempt=2**31 - 1, kind=OutcomeKind.FAILED)
        good = frame(request.request_id, ["a", "b"], attempt=2**31 - 1, end=last)
        for next_frame in [
            *(with_request_id(token_frame, request.request_id) for token_frame in token_frames),
            good,
        ]:
            try:
                decoded_frame = decode_frame(CODEC, CODEC.encode(next_frame))
            except RecordError:
                continue
            gateway.log.hub.apply(decoded_frame, now_s)

    gateway.log.on_request = answer
    async with gateway.client() as client:
        got = await unstalled(client.post("/v1/chat/completions", json=chat(**fields)))
    if got.headers["content-type"].startswith("application/json"):
        json.loads(got.content, parse_constant=no_constant)
    else:
        assert events_of(got.text)
    assert not len(gateway.log.hub)


@examples(50, fuzz_factor=3)
@given(
    st.lists(
        instances("trivium.TurnBatch").map(CODEC.encode)
        | record_bytes(("TurnBatch", "TokenFrame"))
        | st.binary(max_size=40),
        max_size=6,
    )
)
async def test_conversations_survive_forged_turns(values: list[bytes]) -> None:
    buried: list[RecordError] = []

    async def bury(_: ConsumerRecord, error: RecordError) -> None:
        buried.append(error)

    turns = TurnTopic(
        LogSettings(), CODEC, gateway_id="g", back_ms=1, producer=lambda: None, bury=bury
    )
    sessions = Conversations(entries_max=4, idle_ms=1_000)
    turns.on_turn = sessions.add
    for value in values:
        await turns._hand_on(record_of(value))
    assert len(sessions) <= 4
    session = sessions.find("", [{"role": "assistant", "content": "x"}], 5)
    assert session.session_id


@examples(50, fuzz_factor=3)
@given(
    st.lists(
        st.tuples(
            st.builds(
                lambda record, name, epoch: dataclasses.replace(
                    record, member_id=name, epoch=epoch
                ),
                instances("trivium.Registration") | instances("trivium.Heartbeat"),
                st.sampled_from(["a", "b", "", "gateway-a"]),
                st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]),
            ),
            st.sampled_from([None, -(2**63), 0, 2**63 - 1]),
        ),
        max_size=12,
    )
)
def test_fleet_view_survives_forged_members(log_entries: list[tuple[Any, int | None]]) -> None:
    view, now_ms = FleetView(), 1_000
    for offset, (record, logged_ms) in enumerate(log_entries):
        view.apply(record, offset, now_ms, logged_ms)
    for kind in MemberKind:
        for member in view.living(kind, now_ms):
            assert view.apart_ms(member.member_id, "a") >= 0
    for topic in ("tokens", "prefill", "decode"):
        assert set(view.free_partitions(topic, 4, now_ms)) <= set(range(4))
    view.forget(0, now_ms + 1)
    assert not view.members and not view._clocks

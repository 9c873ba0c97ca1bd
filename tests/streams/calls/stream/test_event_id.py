"""Event ids: believed only as this deployment has signed them, by whom they were sent to."""

import asyncio
import base64
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError, InvalidRequest
from schemas.records import Endpoint
from streams.calls import in_flight
from streams.calls.config import GatewaySettings
from streams.calls.stream.event_id import ClientPosition, EventIds, StreamKey, positions_text
from streams.calls.stream.event_key import FILE_NAME, event_key
from streams.log.clock import wall_ms
from tests.streams.gateway.in_process import EVENT_KEY, InProcessGateway
from tests.streams.gateway.samples import chat
from tests.streams.gateway.streamed_call import WITH_IDS
from tests.waits import PATIENCE_S, until

KEY = StreamKey(
    parent_id="r" + "0" * 26,
    session_id="s",
    model="m",
    endpoint=Endpoint.CHAT,
    partition=3,
    offset=17,
    created_s=1_700_000_000,
    deadline_ms=1_700_000_060_000,
    choices=1,
    tenant="alice",
)
IDS = EventIds(EVENT_KEY, choices_max=16)
ID = IDS.name(KEY).decode() + ".2-5-7f"
CHATS = "/v1/chat/completions"


def test_event_id_round_trips_through_any_gateway() -> None:
    key, (at,) = EventIds(EVENT_KEY, choices_max=16).parse(ID, "alice")
    assert key == KEY
    assert (at.next_seq, at.next_char, at.digest) == (2, 5, 0x7F)


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"tenant": "", "prompts": 3, "choices": 16}, 0),
        ({"include_usage": True}, 1),
        ({"token_ids": True}, 2),
        ({"endpoint": Endpoint.COMPLETION}, 4),
        ({"names_ids": True}, 16),
        ({"include_usage": True, "token_ids": True, "endpoint": Endpoint.COMPLETION}, 7),
    ],
)
def test_event_id_round_trips_every_field(changes: dict[str, Any], flags: int) -> None:
    """The first bytes are version and flags, for gateways of another version."""
    key = replace(KEY, **changes)
    assert key.pack()[:2] == bytes((3, flags))
    at = [ClientPosition(2, 5, n == 1, 0xFFFFFFFF) for n in range(key.choices)]
    value = f" {IDS.name(key).decode()}.{positions_text(at).decode()}\n"
    assert IDS.parse(value, key.tenant) == (key, at)
    assert (
        positions_text([ClientPosition(2, 5, digest=0x7F), ClientPosition(is_ended=True)])
        == b"2-5-7f.0-0-0-e"
    )


LARGEST = (1 << 31) - 1


@pytest.mark.parametrize(
    ("positions", "is_refused"),
    [
        (f".{LARGEST}-{LARGEST}-ffffffff-e", False),
        (f".{LARGEST + 1}-5-7f", True),
        (f".2-{LARGEST + 1}-7f", True),
        (".2-5-100000000", True),
        (".2-5-7f-x", True),
        (".2-5-7f-e-e", True),
        (".2-5", True),
        (".2-5-7f.2-5-7f", True),
        ("", True),
        (f".2-5-{'0' * 4_000}7f", True),
    ],
)
def test_event_ids_bound_positions(positions: str, is_refused: bool) -> None:
    value = IDS.name(KEY).decode() + positions
    if not is_refused:
        assert IDS.parse(value, "alice")[1] == [ClientPosition(LARGEST, LARGEST, True, 0xFFFFFFFF)]
        return
    with pytest.raises(InvalidRequest) as caught:
        IDS.parse(value, "alice")
    assert caught.value.param == "Last-Event-ID"
    assert caught.value.message == (
        "Last-Event-ID: expected the id of an event that this deployment has sent for this API "
        f"key, found {value[:60]!r}"
    )


@pytest.mark.parametrize("key", [replace(KEY, choices=0), replace(KEY, choices=17)])
def test_event_ids_reject_impossible_choice_count(key: StreamKey) -> None:
    value = ".".join([IDS.name(key).decode(), *["0-0-0"] * key.choices])
    with pytest.raises(InvalidRequest):
        IDS.parse(value, "alice")


def test_event_ids_reject_key_of_other_version() -> None:
    packed = b"\x02" + KEY.pack()[1:]
    name = base64.urlsafe_b64encode(IDS._sign("alice", packed) + packed).rstrip(b"=")
    with pytest.raises(InvalidRequest):
        IDS.parse(name.decode() + ".2-5-7f", "alice")


@given(st.integers(0, len(ID.partition(".")[0]) - 1), st.sampled_from("AQgw_-"))
def test_event_ids_reject_changed_key(at: int, char: str) -> None:
    forged = ID[:at] + char + ID[at + 1 :]
    try:
        assert IDS.parse(forged, "alice")[0] == KEY, "only what base64 ignores may differ"
    except InvalidRequest as error:
        assert "this deployment has sent" in error.message


@pytest.mark.parametrize(
    ("ids", "tenant"),
    [
        (EventIds("x" * 32, choices_max=16), "alice"),
        (IDS, "bob"),
        (IDS, ""),
    ],
)
def test_event_ids_reject_other_deployment_or_tenant(ids: EventIds, tenant: str) -> None:
    with pytest.raises(InvalidRequest):
        ids.parse(ID, tenant)


async def event_of(gateway: InProcessGateway, **headers: str) -> tuple[str, str]:
    """Path and id of the first event of an answer that was streamed."""
    gateway.answer_with("a", "b")
    async with gateway.client() as client:
        response = await client.post(CHATS, json=chat(stream=True), headers=headers | WITH_IDS)
    event_id = next(line[4:] for line in response.text.splitlines() if line.startswith("id: "))
    return f"/v1/requests/{response.headers['x-request-id']}/events", event_id


async def test_forged_event_ids_take_no_resume_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forged id must not take a slot until a time of its own choice."""
    monkeypatch.setattr(in_flight, "RESUMES_MAX", 1)
    gateway = InProcessGateway()
    path, event_id = await event_of(gateway)
    gateway.log.on_request = None
    key, _ = gateway.state.event_ids.parse(event_id, "")
    thief = EventIds("k" * 32, choices_max=16)
    later = replace(key, created_s=2**32 - 1, deadline_ms=2**62)
    async with gateway.client() as client, asyncio.timeout(PATIENCE_S):
        for forged in (thief.name(later).decode() + ".0-0-0", "A" * 90 + ".0-0-0"):
            answer = await client.get(path, headers={"last-event-id": forged})
            assert answer.status_code == 400
            assert not gateway.state.calls.resumed


@pytest.mark.parametrize(("deadline_ms", "more_ms"), [(600_000, 600_000), (1_000, 15_000)])
async def test_resumed_call_ends_with_its_request(
    deadline_ms: int, more_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the accepted deadline, or once it has read what is on the log."""
    gateway = InProcessGateway()
    path, event_id = await event_of(gateway, **{"x-deadline-ms": str(deadline_ms)})
    (request,) = gateway.log.requests
    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        began_ms = wall_ms()
        resume = client.get(path, headers={"last-event-id": event_id})
        task = tasks.create_task(resume)
        await until(lambda: len(gateway.state.calls.resumed) == 1)
        (follower,) = gateway.state.calls.resumed
        least_ms = request.arrived_ms if deadline_ms == more_ms else began_ms
        assert follower.deadline_ms >= least_ms + more_ms
        assert follower.deadline_ms <= max(request.deadline_ms, wall_ms() + 15_000)
        gateway.state.calls.sweep(0.0, follower.deadline_ms + 2_001)
        assert (await task).status_code == 504


async def test_gateway_limits_resumes_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of one caller must not take all slots."""
    monkeypatch.setattr(in_flight, "RESUMES_PER_REQUEST_MAX", 1)
    gateway = InProcessGateway()
    path, event_id = await event_of(gateway)
    async with gateway.client() as client:
        first = asyncio.create_task(client.get(path, headers={"last-event-id": event_id}))
        await until(lambda: len(gateway.state.calls.resumed) == 1)
        refused = await client.get(path, headers={"last-event-id": event_id})
        assert refused.status_code == 429
        gateway.state.calls.sweep(0.0, 2**62)
        await first


async def test_other_api_key_cannot_resume_or_cancel() -> None:
    """A tenant that knows the id of another's request learns nothing about it."""
    gateway = InProcessGateway(api_keys=("alice", "bob"))

    def headers(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {name}"}

    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(
            client.post(CHATS, json=chat(stream=True), headers=headers("alice"))
        )
        await gateway.log.wait_sent(1)
        path = f"/v1/requests/{gateway.log.requests[0].request_id}"
        for method, end in (("GET", "/events"), ("DELETE", "")):
            answer = await client.request(method, path + end, headers=headers("bob"))
            assert answer.status_code == 404
        assert (await client.delete(path, headers=headers("alice"))).status_code == 200
        gateway.state.calls.sweep(0.0, 2**62)
        await task


def test_gateways_share_private_event_key_in_state_folder(tmp_path: Path) -> None:
    """The first gateway creates the key."""
    first = event_key("", tmp_path / "state")
    assert event_key("", tmp_path / "state") == first
    assert len(first) >= 32
    assert event_key("", tmp_path / "other") != first
    assert event_key("set", tmp_path / "state") == "set"
    file = tmp_path / "state" / FILE_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    file.write_text("short")
    with pytest.raises(ConfigError, match="expected a key of at least 32 characters, found 5"):
        event_key("", tmp_path / "state")


def test_settings_check_and_hide_event_key() -> None:
    with pytest.raises(ConfigError, match="event_key: expected at least 32 characters, found 4"):
        GatewaySettings(event_key="four")
    text: Any = repr(GatewaySettings(event_key=EVENT_KEY))
    assert EVENT_KEY not in text

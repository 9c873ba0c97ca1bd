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
from schemas.log.clock import wall_ms
from schemas.records import Endpoint
from streams.gateway.config import GatewaySettings
from streams.gateway.stream.event_id import ClientPosition, EventIds, StreamKey, positions_text
from streams.gateway.stream.event_key import FILE_NAME, event_key
from tests.streams.gateway.in_process import EVENT_KEY, InProcessGateway
from tests.streams.gateway.samples import chat
from tests.streams.gateway.streamed_call import WITH_IDS
from tests.waiting import PATIENCE_S, until

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


def test_an_id_comes_back_as_it_was() -> None:
    """Through any gateway with the deployment's key."""
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
        ({"include_usage": True, "token_ids": True, "endpoint": Endpoint.COMPLETION}, 7),
    ],
)
def test_all_that_a_key_says_comes_back(changes: dict[str, Any], flags: int) -> None:
    """To a gateway of another version, too: the first bytes are the version and flags."""
    made = replace(KEY, **changes)
    assert made.pack()[:2] == bytes((3, flags))
    at = [ClientPosition(2, 5, n == 1, 0xFFFFFFFF) for n in range(made.choices)]
    value = f" {IDS.name(made).decode()}.{positions_text(at).decode()}\n"
    assert IDS.parse(value, made.tenant) == (made, at)
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
def test_positions_are_bounded(positions: str, is_refused: bool) -> None:
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


@pytest.mark.parametrize("made", [replace(KEY, choices=0), replace(KEY, choices=17)])
def test_no_key_of_ours_has_so_many_choices(made: StreamKey) -> None:
    value = ".".join([IDS.name(made).decode(), *["0-0-0"] * made.choices])
    with pytest.raises(InvalidRequest):
        IDS.parse(value, "alice")


def test_a_key_of_another_version_is_refused() -> None:
    packed = b"\x02" + KEY.pack()[1:]
    name = base64.urlsafe_b64encode(IDS._sign("alice", packed) + packed).rstrip(b"=")
    with pytest.raises(InvalidRequest):
        IDS.parse(name.decode() + ".2-5-7f", "alice")


@given(st.integers(0, len(ID.partition(".")[0]) - 1), st.sampled_from("AQgw_-"))
def test_a_changed_key_is_refused(at: int, char: str) -> None:
    """Whichever character is forged."""
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
def test_an_id_is_worth_nothing_elsewhere_or_to_others(ids: EventIds, tenant: str) -> None:
    """Another deployment, and another API key."""
    with pytest.raises(InvalidRequest):
        ids.parse(ID, tenant)


async def event_of(gateway: InProcessGateway, **headers: str) -> tuple[str, str]:
    """Path and id of the first event of an answer that was streamed."""
    gateway.answer_with("a", "b")
    async with gateway.client() as client:
        response = await client.post(CHATS, json=chat(stream=True), headers=headers | WITH_IDS)
    event_id = next(line[4:] for line in response.text.splitlines() if line.startswith("id: "))
    return f"/v1/requests/{response.headers['x-request-id']}/events", event_id


async def test_forged_ids_take_no_place_of_resumes() -> None:
    """Each was a place for an hour and more, by a time that it named itself."""
    gateway = InProcessGateway(resumes_max=1)
    path, event_id = await event_of(gateway)
    gateway.log.on_request = None
    key, _ = gateway.state.event_ids.parse(event_id, "")
    thief = EventIds("k" * 32, choices_max=16)
    later = replace(key, created_s=2**32 - 1, deadline_ms=2**62)
    async with gateway.client() as client, asyncio.timeout(PATIENCE_S):
        for forged in (thief.name(later).decode() + ".0-0-0", "A" * 90 + ".0-0-0"):
            answer = await client.get(path, headers={"last-event-id": forged})
            assert answer.status_code == 400
            assert not gateway.state.resumed_calls


@pytest.mark.parametrize(("deadline_ms", "more_ms"), [(600_000, 600_000), (1_000, 15_000)])
async def test_a_resume_ends_with_its_request(
    deadline_ms: int, more_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the deadline that was accepted, or once it has read what is there."""
    gateway = InProcessGateway()
    path, event_id = await event_of(gateway, **{"x-deadline-ms": str(deadline_ms)})
    (request,) = gateway.log.requests
    async with gateway.client() as client, asyncio.TaskGroup() as tasks:
        began_ms = wall_ms()
        resume = client.get(path, headers={"last-event-id": event_id})
        task = tasks.create_task(resume)
        await until(lambda: len(gateway.state.resumed_calls) == 1)
        (follower,) = gateway.state.resumed_calls
        least_ms = request.arrived_ms if deadline_ms == more_ms else began_ms
        assert follower.deadline_ms >= least_ms + more_ms
        assert follower.deadline_ms <= max(request.deadline_ms, wall_ms() + 15_000)
        gateway.state.sweep(0.0, follower.deadline_ms + 2_001)
        assert (await task).status_code == 504


async def test_one_request_is_resumed_a_few_times_at_once() -> None:
    """So one caller's id does not take all places either."""
    gateway = InProcessGateway(resumes_per_request_max=1)
    path, event_id = await event_of(gateway)
    async with gateway.client() as client:
        first = asyncio.create_task(client.get(path, headers={"last-event-id": event_id}))
        await until(lambda: len(gateway.state.resumed_calls) == 1)
        refused = await client.get(path, headers={"last-event-id": event_id})
        assert refused.status_code == 429
        gateway.state.sweep(0.0, 2**62)
        await first


async def test_another_key_neither_follows_nor_cancels() -> None:
    """Who knows an id of somebody else's request is told nothing of it."""
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
        gateway.state.sweep(0.0, 2**62)
        await task


def test_gateways_of_one_state_folder_share_a_key_that_nobody_else_reads(tmp_path: Path) -> None:
    """Made by the first one."""
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


def test_a_key_in_the_settings_is_checked_and_not_shown() -> None:
    """As every secret."""
    with pytest.raises(ConfigError, match="event_key: expected at least 32 characters, found 4"):
        GatewaySettings(event_key="four")
    shown: Any = repr(GatewaySettings(event_key=EVENT_KEY))
    assert EVENT_KEY not in shown

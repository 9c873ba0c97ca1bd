"""What `trivium status` and `trivium tail` print, from records at hand."""

import io
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from rich.console import Console

from infra.cli.log.tail import _line
from infra.cli.operate.status import _view, members
from infra.stack.fleet_watch import FleetWatch
from infra.stack.reassignment import _same_life, find_worker
from infra.terminal.output import PIPED_COLUMNS, stdout_console
from schemas.codec import Codec
from schemas.errors import ConfigError, NotReady
from schemas.fleet import LEASE_MS, FleetView
from schemas.log.clock import wall_ms
from schemas.prefix import pack
from schemas.records import (
    AssignRoles,
    Capability,
    Decision,
    DecisionKind,
    Estimate,
    KvEvents,
    Mode,
    Orchestration,
    Reason,
    Role,
)
from schemas.settings import LogSettings
from tests.streams.builders import T0, beat, registration, request

CODEC = Codec()


@dataclass
class Found:
    """A record as a reader gives it."""

    value: bytes
    key: bytes = b"k"
    partition: int = 2
    offset: int = 40
    timestamp: int = 1_000
    headers: tuple[Any, ...] = ()


def line(record: Any, *, as_json: bool = False) -> str:
    return _line(CODEC, Found(CODEC.encode(record)), as_json)


DECISION = Decision(
    request_id="r1",
    session_id="s1",
    attempt=2,
    router_id="router-0",
    at_ms=1_000,
    kind=DecisionKind.PLACE,
    policy="learned",
    reason=Reason.EXPLORING,
    mode=Mode.REMOTE,
    orchestration=Orchestration.DECODE_FIRST,
    prefill_worker="prefill-0",
    decode_worker="decode-1",
    waited_ms=7,
    estimate=Estimate(
        ttft_local_ms=80,
        ttft_remote_ms=60,
        tpot_local_ms=12.5,
        tpot_remote_ms=11,
        score=-0.25,
        samples=35,
    ),
)


def test_decisions_say_what_and_why_in_a_line() -> None:
    assert line(DECISION) == (
        "2/40 Decision k: r1 place remote decode_first on prefill-0 → decode-1 because exploring "
        "(policy learned) attempt 2 waited 7 ms TTFT 80 ms local, 60 remote; TPOT 12.5 local, "
        "11.0 remote; score -0.250 from 35"
    )
    tabled = replace(DECISION, estimate=Estimate(score=0.1, samples=9))
    assert line(tabled).endswith(" waited 7 ms score +0.100 from 9")
    bare = replace(
        DECISION,
        kind=DecisionKind.SHED,
        policy="",
        reason=Reason.QUEUE_FULL,
        mode=Mode.NONE,
        orchestration=Orchestration.NONE,
        prefill_worker="",
        decode_worker="",
        attempt=1,
        waited_ms=0,
        estimate=None,
    )
    assert line(bare) == "2/40 Decision k: r1 shed because queue_full (policy none)"
    assert json.loads(line(DECISION, as_json=True))["value"]["estimate"]["samples"] == 35


def test_dead_letters_say_why_they_were_buried() -> None:
    origin = {"topic": "requests", "partition": "1", "offset": "7", "error-message": "too old"}
    headers = tuple((f"x-dlq-{name}", value.encode()) for name, value in origin.items())
    letter = Found(CODEC.encode(request()), headers=headers)
    shown = _line(CODEC, letter, False)
    assert shown.startswith("2/40 Request k: buried from requests 1/7, too old; request_id=")
    assert json.loads(_line(CODEC, letter, True))["buried"] == origin
    damaged = _line(CODEC, Found(b"", headers=headers), False)
    assert "2/40 undecodable k: error=" in damaged and "x-dlq-error-message=too old" in damaged


def test_a_deleted_key_is_no_damage() -> None:
    assert _line(CODEC, Found(b""), False) == "2/40 Tombstone k: "


def test_block_hashes_are_counted() -> None:
    events = KvEvents(
        worker_id="decode-0",
        epoch=3,
        seq=9,
        at_ms=1_000,
        block_size=16,
        stored=pack([1, 2, 3]),
    )
    assert line(events).startswith("2/40 KvEvents k: worker_id=decode-0 epoch=3 seq=9 ")
    assert "stored=3 blocks" in line(events)
    assert "removed" not in line(events)
    assert json.loads(line(events, as_json=True))["value"]["stored"] == pack([1, 2, 3]).hex()


def test_prompts_are_unpacked() -> None:
    assert "prompt_tokens=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, and 8 more]" in line(
        request(tokens=20)
    )
    assert json.loads(line(request(tokens=3), as_json=True))["value"]["prompt_tokens"] == [0, 1, 2]


class Watch:
    """A fleet at hand."""

    def __init__(self) -> None:
        self.view = FleetView()


def fleet() -> Any:
    """Two workers that can do the same, and one that takes two roles on two cards."""
    can = Capability(
        model="tiny",
        engine="sim",
        engine_id="e",
        block_size=16,
        max_model_len=512,
        running_max=8,
        orchestrations=[Orchestration.PREFILL_FIRST, Orchestration.CONCURRENT],
    )
    found, now_ms = Watch(), wall_ms() + 60_000  # heard late, so that no stall makes them lost
    both = replace(can, tensor_parallel=2, orchestrations=[Orchestration.PREFILL_FIRST])
    for number, (name, roles, capability) in enumerate(
        (
            ("prefill-0", (Role.PREFILL,), can),
            ("prefill-1", (Role.PREFILL,), can),
            ("both-0", (Role.PREFILL, Role.DECODE), both),
        )
    ):
        one = registration(name, *roles, partition=number, capability=capability)
        found.view.apply(one, 2 * number, now_ms)
        granted = dict.fromkeys(roles, 4)
        found.view.apply(beat(name, 1, granted, at_ms=now_ms), 2 * number + 1, now_ms)
    return found


def shown(rows: list[dict[str, Any]], columns: int) -> list[str]:
    """The lines of `trivium status`, without what aligns them."""
    out = io.StringIO()
    Console(file=out, width=columns).print(_view(rows))
    return [" ".join(row.split()) for row in out.getvalue().splitlines()]


def test_status_tells_roles_and_what_engines_can_do() -> None:
    rows = members(fleet())
    both = next(row for row in rows if row["member_id"] == "both-0")
    assert both["roles"] == ["prefill", "decode"]
    assert (both["tensor_parallel"], both["orchestrations"]) == (2, ["prefill_first"])
    lines = shown(rows, 120)
    assert any(row.startswith("both-0 prefill, decode ready 4/4") for row in lines)
    assert "sim tiny 1 prefill_first, concurrent prefill-0, prefill-1" in lines
    assert "sim tiny 2 prefill_first both-0" in lines


def test_status_tells_how_well_clocks_agree() -> None:
    """(issue 10, 10)"""
    rows = members(fleet())
    rows[0]["clock_ms"] = -240
    assert "Clocks agree within 240 ms; KV moves within 250 ms." in shown(rows, 120)
    rows[1]["clock_ms"] = 20
    told = " ".join(shown(rows, 120))
    assert f"Clocks differ by 260 ms ({rows[0]['member_id']} is behind" in told


def test_status_fits_a_terminal_of_80_columns() -> None:
    rows = members(fleet())
    for row in rows:
        row["roles"], row["load"] = ["retrieval"], {**row["load"], "kv_blocks_total": 8192}
    head, *_ = shown(rows, 80)
    assert head == "member roles state credits running waiting tokens/s KV blocks KV out/in"
    rows[0] |= {"state": "lost", "silent_ms": 4_200}
    assert "both-0 retrieval lost 4 s 4/4 0 0 0/8192" in shown(rows, 100)
    assert any(row.startswith("both-0 retrieval lost") for row in shown(rows, 80))


def test_a_worker_is_silent_only_while_others_are_heard() -> None:
    watch, order = (
        FleetWatch(LogSettings()),
        AssignRoles(worker_id="both-0", worker_epoch=1, roles=(Role.DECODE,), at_ms=T0),
    )
    records = [registration("both-0", Role.DECODE), beat("both-0", 1), beat("other-0", 1)]
    for offset, (record, now_ms) in enumerate(
        zip(records, (T0, T0 + 500, T0 + 500 + LEASE_MS), strict=True)
    ):
        watch._fold(CODEC.encode(record), offset, now_ms)
        assert _same_life(watch, order).epoch == 1  # T0 is long ago, and nobody was heard since
    watch._fold(CODEC.encode(beat("other-0", 2)), 3, T0 + 501 + LEASE_MS)
    with pytest.raises(NotReady, match="both-0 fell silent before it had followed the order"):
        _same_life(watch, order)


def test_tables_in_a_pipe_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert stdout_console().width == PIPED_COLUMNS
    monkeypatch.setenv("COLUMNS", "90")
    assert stdout_console().width == 90


def test_only_workers_with_a_language_model_can_be_moved() -> None:
    watch = fleet()
    search = replace(registration("search-0", Role.DECODE, partition=7), roles=[Role.RETRIEVAL])
    watch.view.apply(search, 100, wall_ms())
    assert find_worker(watch, "both-0").member_id == "both-0"
    with pytest.raises(ConfigError, match="no worker 'x' lives; expected one of: both-0, prefill"):
        find_worker(watch, "x")
    with pytest.raises(ConfigError, match="search-0 serves retrieval; expected a worker with a"):
        find_worker(watch, "search-0")


def test_status_of_nobody() -> None:
    assert shown([], 120)[0].startswith("nobody is there")

"""What `trivium tail` prints, from records at hand."""

import json
from dataclasses import dataclass, replace
from typing import Any

from infra.cli.log.tail import _line
from schemas.prefix import pack
from schemas.records import (
    Decision,
    DecisionKind,
    Estimate,
    KvEvents,
    Mode,
    Orchestration,
    Reason,
)
from tests.infra.watched_fleet import CODEC
from tests.streams.builders import request


@dataclass
class StoredRecord:
    """A record as a reader gives it."""

    value: bytes
    key: bytes = b"k"
    partition: int = 2
    offset: int = 40
    timestamp: int = 1_000
    headers: tuple[Any, ...] = ()


def line(record: Any, *, as_json: bool = False) -> str:
    return _line(CODEC, StoredRecord(CODEC.encode(record)), as_json)


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


def test_tail_prints_decision_in_one_line() -> None:
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


def test_tail_prints_origin_of_dead_letter() -> None:
    origin = {"topic": "requests", "partition": "1", "offset": "7", "error-message": "too old"}
    headers = tuple((f"x-dlq-{name}", value.encode()) for name, value in origin.items())
    letter = StoredRecord(CODEC.encode(request()), headers=headers)
    text = _line(CODEC, letter, False)
    assert text.startswith("2/40 Request k: buried from requests 1/7, too old; request_id=")
    assert json.loads(_line(CODEC, letter, True))["buried"] == origin
    damaged = _line(CODEC, StoredRecord(b"", headers=headers), False)
    assert "2/40 undecodable k: error=" in damaged and "x-dlq-error-message=too old" in damaged


def test_tail_prints_tombstone_for_empty_value() -> None:
    assert _line(CODEC, StoredRecord(b""), False) == "2/40 Tombstone k: "


def test_tail_counts_block_hashes() -> None:
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


def test_tail_unpacks_and_abbreviates_prompt_tokens() -> None:
    assert "prompt_tokens=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, and 8 more]" in line(
        request(tokens=20)
    )
    assert json.loads(line(request(tokens=3), as_json=True))["value"]["prompt_tokens"] == [0, 1, 2]

"""A recording without what was said decides the same, and says nothing of it."""

import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from infra.replay.redacting import redact
from infra.replay.replaying import replay
from infra.traces.recording import LINE, SNAPSHOT, RecordingRow, write
from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.prefix import chain
from schemas.records import Parsing, Request, Sampling
from schemas.rules.tokens import token_array
from streams.core.placement.prefixes import PrefixIndex
from tests.infra.replay.played_router import PlayedRouter, answered
from tests.infra.replay.simulator_recorder import Recorder
from tests.infra.simulator.storms import SETUP, weathered
from tests.streams import builders

CODEC = Codec()
TEXT = "the ferry leaves at nine"
IDS = (7, 77_777)


def requests_in(rows: Iterable[RecordingRow]) -> list[Request]:
    return [CODEC.decode(row.value) for row in rows if row.topic == "requests"]


def bytes_in(rows: Iterable[RecordingRow]) -> bytes:
    """Return the bytes of all values, those in states included."""
    states = (CODEC.decode(row.value).state for row in rows if row.kind == SNAPSHOT)
    return b"".join([*(row.value for row in rows), *map(zlib.decompress, states)])


def in_state(text: str) -> bytes:
    """Return the text as a pickled state has it."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


@pytest.mark.parametrize(("seed", "searching", "probing"), [(0, False, False), (9, True, True)])
def test_redacted_recording_replays_to_same_decisions(
    tmp_path: Path, seed: int, searching: bool, probing: bool
) -> None:
    """Storms have prefix caches, searches, continued answers and dying routers."""
    recorder = Recorder()
    weathered(seed, extra_checkers=[recorder], searching=searching, probing=probing)
    before = recorder.all_rows
    rows = list(redact(before, names=searching))
    write(tmp_path / "a.avro", {}, rows)
    report = replay(tmp_path / "a.avro")
    assert report.is_equal
    assert report.events == sum(row.kind == LINE for row in before) > 500
    payload = bytes_in(rows)
    for request, redacted_request in zip(requests_in(before), requests_in(rows), strict=True):
        assert request.prompt_tokens[:64] not in payload
        assert len(redacted_request.prompt_tokens) == len(request.prompt_tokens)
        assert (redacted_request.session_id == request.session_id) is not searching
        assert not searching or in_state(request.session_id) not in payload
    assert _block_numbers(requests_in(before)) == _block_numbers(requests_in(rows))


def _block_numbers(requests: list[Request]) -> list[list[int]]:
    """Number the blocks of each prompt by their first appearance."""
    numbers: dict[int, int] = {}
    return [
        [
            numbers.setdefault(value, len(numbers))
            for value in chain(token_array(request.prompt_tokens), SETUP.block_tokens).tolist()
        ]
        for request in requests
    ]


def spoken() -> PlayedRouter:
    """Play requests that have texts beside the prompt."""
    played = answered(PlayedRouter(), ["r1"])
    wish = builders.retrieval(by_ms=played.now_ms + 5_000, query=TEXT, filter=TEXT)
    played.happens("requests", builders.request("r2", retrieval=wish, tenant="anna"))
    passage = builders.passage(1, text=TEXT, title=TEXT, source=TEXT, content=TEXT)
    played.happens("phases", builders.retrieved("r2", passage))
    played.snapshot()
    sampling = Sampling(
        max_tokens=16,
        stop=(TEXT,),
        bad_words=(TEXT,),
        logit_bias={"77777": 1.0},
        allowed_token_ids=IDS,
    )
    parsing = Parsing(tools=TEXT, tool_choice=TEXT, template_kwargs=TEXT)
    third = builders.request("r3", tenant="anna", sampling=sampling, parsing=parsing)
    played.happens("requests", third)
    return played


def rows_of(played: PlayedRouter) -> list[RecordingRow]:
    life = played.life()
    assert life.cut(0, 1 << 62)
    return list(life.rows(CODEC, played.records))


@pytest.mark.parametrize("names", [False, True])
def test_redaction_removes_texts_and_optionally_names(names: bool) -> None:
    """Texts stand in requests, passages and states."""
    before = rows_of(spoken())
    assert TEXT.encode() in bytes_in(before)
    rows = list(redact(before, names=names))
    payload = bytes_in(rows)
    assert TEXT.encode() not in payload
    assert {request.sampling.allowed_token_ids for request in requests_in(before)} == {(), IDS}
    assert {request.sampling.allowed_token_ids for request in requests_in(rows)} == {()}
    assert b"77777" not in payload
    assert (b"anna" in payload) is not names
    assert (b"handbook" in payload) is not names
    assert b"r2" in payload


def test_redaction_refuses_recording_that_replays_otherwise() -> None:
    """The stand-ins of such a recording could not be checked."""
    rows = rows_of(answered(PlayedRouter(), ["r1"]))
    rows[-1] = rows[-1]._replace(effects=7)
    with pytest.raises(RecordError, match="router-a life 5, line .*decided otherwise here"):
        list(redact(rows))


def test_redaction_refuses_stand_ins_that_change_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here worker caches do not know the blocks of the stand-ins."""
    recorder = Recorder()
    weathered(0, extra_checkers=[recorder])
    monkeypatch.setattr(PrefixIndex, "map_hashes", lambda index, names: index)
    with pytest.raises(RecordError, match="without what was said it would be decided otherwise"):
        list(redact(recorder.all_rows))

"""A recording without what was said decides the same, and says nothing of it."""

import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from infra.replay.recording import LINE, SNAPSHOT, RecordingRow, write
from infra.replay.redacting import redact
from infra.replay.replaying import replay
from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.prefix import chain
from schemas.records import Request, Sampling
from schemas.rules.tokens import token_array
from streams.core.placement.prefixes import PrefixIndex
from tests.infra.replay.played import Played, answered
from tests.infra.replay.simulated import Recorder
from tests.infra.simulator.storms import SETUP, weathered
from tests.streams import builders

CODEC = Codec()
TEXT = "the ferry leaves at nine"


def requests_in(rows: Iterable[RecordingRow]) -> list[Request]:
    return [CODEC.decode(each.value) for each in rows if each.topic == "requests"]


def bytes_in(rows: Iterable[RecordingRow]) -> bytes:
    """All values, those in states too."""
    states = (CODEC.decode(each.value).state for each in rows if each.kind == SNAPSHOT)
    return b"".join([*(each.value for each in rows), *map(zlib.decompress, states)])


def in_state(text: str) -> bytes:
    """As a state has it."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


@pytest.mark.parametrize(("seed", "searching", "probing"), [(0, False, False), (9, True, True)])
def test_a_recording_without_bodies_decides_the_same(
    tmp_path: Path, seed: int, searching: bool, probing: bool
) -> None:
    """With prefix caches, searches, answers that go on, and routers that die."""
    recorder = Recorder()
    weathered(seed, more=[recorder], searching=searching, probing=probing)
    before = recorder.all_rows
    rows = list(redact(before, names=searching))
    write(tmp_path / "a.avro", {}, rows)
    report = replay(tmp_path / "a.avro")
    assert report.is_equal
    assert report.events == sum(each.kind == LINE for each in before) > 500
    told = bytes_in(rows)
    for request, other in zip(requests_in(before), requests_in(rows), strict=True):
        assert request.prompt_tokens[:64] not in told
        assert len(other.prompt_tokens) == len(request.prompt_tokens)
        assert (other.session_id == request.session_id) is not searching
        assert not searching or in_state(request.session_id) not in told
    assert _alike(requests_in(before)) == _alike(requests_in(rows))


def _alike(requests: list[Request]) -> list[list[int]]:
    """Of each prompt, by which of all blocks it begins, numbered by their first appearance."""
    numbers: dict[int, int] = {}
    return [
        [
            numbers.setdefault(value, len(numbers))
            for value in chain(token_array(each.prompt_tokens), SETUP.block_tokens).tolist()
        ]
        for each in requests
    ]


def spoken() -> Played:
    """With texts beside the prompt."""
    played = answered(Played(), ["r1"])
    wish = builders.retrieval(by_ms=played.now_ms + 5_000, query=TEXT, filter=TEXT)
    played.happens("requests", builders.request("r2", retrieval=wish, tenant="anna"))
    found = builders.passage(1, text=TEXT, title=TEXT, source=TEXT, content=TEXT)
    played.happens("phases", builders.retrieved("r2", found))
    played.snapshot()
    sampling = Sampling(max_tokens=16, stop=(TEXT,), bad_words=(TEXT,), logit_bias={"77777": 1.0})
    played.happens("requests", builders.request("r3", tenant="anna", sampling=sampling))
    return played


def rows_of(played: Played) -> list[RecordingRow]:
    life = played.life()
    assert life.cut(0, 1 << 62)
    return list(life.rows(CODEC, played.records))


@pytest.mark.parametrize("names", [False, True])
def test_texts_and_names_are_left_out(names: bool) -> None:
    """Those of requests, passages and states."""
    before = rows_of(spoken())
    assert TEXT.encode() in bytes_in(before)
    told = bytes_in(list(redact(before, names=names)))
    assert TEXT.encode() not in told
    assert b"77777" not in told
    assert (b"anna" in told) is not names
    assert (b"handbook" in told) is not names
    assert b"r2" in told


def test_what_is_decided_otherwise_is_not_made() -> None:
    """Its stand-ins could not be checked."""
    rows = rows_of(answered(Played(), ["r1"]))
    rows[-1] = rows[-1]._replace(effects=7)
    with pytest.raises(RecordError, match="router-a life 5, line .*decided otherwise here"):
        list(redact(rows))


def test_what_would_be_decided_otherwise_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where workers' caches are not told of by the blocks of stand-ins."""
    recorder = Recorder()
    weathered(0, more=[recorder])
    monkeypatch.setattr(PrefixIndex, "map_hashes", lambda index, names: index)
    with pytest.raises(RecordError, match="without what was said it would be decided otherwise"):
        list(redact(recorder.all_rows))

"""What the audit of a log takes for what."""

from dataclasses import replace
from typing import Any

import pytest

from infra.bench.faults import log_audit
from infra.bench.faults.log_audit import DeltaChecker
from schemas.records import (
    AnswerDelta,
    DeltaKind,
    Phase,
    PhaseKind,
    StreamDeltas,
    TokenFrame,
    WorkPhase,
)
from schemas.settings import LogSettings
from tests.infra.story.story_records import work
from tests.streams.builders import continued, passage, phase, request, retrieved
from tests.streams.gateway.samples import frame, stream_end


async def test_log_audit_excludes_retrieval_from_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of retrieval lie on the topic of phases."""
    received: Phase = phase(work(WorkPhase.DECODE, "d0", 5), PhaseKind.KV_RECEIVED, kv_bytes=7)
    records: dict[str, list[Any]] = {
        "requests": [request("r1")],
        "phases": [retrieved("r1", passage(1)), received, continued("r1", 1)],
    }

    async def read(log: LogSettings, topic: str) -> list[Any]:
        return records.get(topic, [])

    monkeypatch.setattr(log_audit, "read_topic", read)
    result = await log_audit.read_audit(LogSettings())
    assert result.phases == {"r1": [received]} and result.kv_bytes() == 7


def parsed_frame(attempt: int, first: int, tokens: list[int], *deltas: AnswerDelta) -> TokenFrame:
    """Return a frame with a row of r1, whose answer is parsed."""
    row = StreamDeltas(request_id="r1", attempt=attempt, first_seq=first, deltas=deltas)
    return replace(
        frame("r1", [""] * len(tokens), attempt=attempt, first_seq=first),
        token_ids=tokens,
        deltas=[row] if deltas else [],
    )


def content(seq: int, text: str) -> AnswerDelta:
    return AnswerDelta(seq=seq, kind=DeltaKind.CONTENT, text=text)


def differences(*frames: TokenFrame, parsed: tuple[str, ...] = ("r1",)) -> list[str]:
    checker = DeltaChecker(parsed)
    return [name for a_frame in frames for name in checker.differences(a_frame)]


def end_frame(attempt: int, seq: int, *deltas: AnswerDelta) -> TokenFrame:
    end = replace(stream_end("r1", attempt=attempt), seq=seq, deltas=deltas)
    return frame("r1", [], end=end)


def test_deltas_follow_from_tokens_in_every_attempt() -> None:
    """Rows may be cut otherwise; an attempt may begin behind the tokens of an earlier one."""
    first = [parsed_frame(1, 0, [5, 6], content(2, "a")), parsed_frame(1, 2, [7], content(3, "b"))]
    second = [parsed_frame(2, 0, [5]), parsed_frame(2, 1, [6, 7], content(2, "a"), content(3, "b"))]
    assert not differences(*first, *second)
    rest = [parsed_frame(2, 2, [7, 8], content(3, "b"), content(4, "c")), end_frame(2, 4)]
    assert not differences(*first, *rest, parsed_frame(3, 4, []), end_frame(3, 4))
    assert not differences(*first, parsed_frame(2, 0, [5, 9], content(2, "z"))), "other tokens"
    assert differences(*first, parsed_frame(2, 2, [7], content(3, "z"))) == [
        "('r1', 2): other deltas after token 3"
    ]
    assert differences(*first, parsed_frame(2, 1, [6])) == ["('r1', 2): other deltas after token 2"]
    ends = [end_frame(1, 3, content(3, "x")), *second, end_frame(2, 3)]
    assert differences(*first, *ends) == ["('r1', 2): other deltas of the end"]
    assert not differences(*first, *ends, parsed=())

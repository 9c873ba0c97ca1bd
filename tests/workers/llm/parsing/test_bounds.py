"""What a worker does with parsed answers that it cannot parse, or that fit into no record."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from schemas.records import AnswerDelta, DeltaKind, OutcomeKind, Parsing, PhaseKind, Sampling, Work
from schemas.rules.sizes import DELTAS_BYTES_MAX
from tests.workers.fakes import out
from tests.workers.llm.worker_in_memory import WorkerInMemory
from workers.llm.parsing.parsers import ParsedEnd

PARSING = Parsing(tools="[]", tool_choice="auto")


class WithholdingParsers:
    """Parsers that write the arguments of a call at once: at a token, or at the end."""

    sampling = Sampling(max_tokens=9)

    def __init__(self, delta_bytes: int, at_token: int = 0) -> None:
        self._at_token, self._count = at_token, 0
        self._deltas = [AnswerDelta(seq=2, kind=DeltaKind.CALL, text="a" * delta_bytes)]

    def begin(self, work: Work, prompt: Sequence[int]) -> "WithholdingParsers":
        return self

    binds_reasoning = False
    thinking_end = ""

    def feed(self, token_ids: Sequence[int]) -> list[AnswerDelta]:
        self._count += len(token_ids)
        return self._deltas if self._count == self._at_token else []

    def finish(self, finish_reason: str) -> ParsedEnd:
        return ParsedEnd([] if self._at_token else self._deltas, "tool_calls", 0)


def test_worker_without_parsers_refuses_parsed_answer() -> None:
    """Another worker may have them."""
    worker = WorkerInMemory()
    worker.work(parsing=PARSING)
    (phase,) = worker.phases
    assert phase.kind is PhaseKind.REFUSED and phase.error is not None and phase.error.retriable
    assert "no parser of tool calls or reasoning: start it with model.tool" in phase.error.message


@pytest.mark.parametrize("at_token", [0, 2])
def test_answer_whose_deltas_fit_into_no_frame_fails(at_token: int) -> None:
    """Other workers would parse it to the same deltas, so the request is not tried again."""
    worker = WorkerInMemory(parsers=WithholdingParsers(DELTAS_BYTES_MAX + 1, at_token))
    worker.work(parsing=PARSING)
    worker.step(out(ids=[5]))
    worker.step(out(ids=[6], finish_reason="stop"))
    (phase,) = worker.phases
    assert phase.kind is PhaseKind.FAILED and phase.error is not None
    assert (phase.error.code, phase.error.retriable) == ("record_too_large", False)
    assert not len(worker.requests)


@pytest.mark.parametrize("at_token", [0, 2])
def test_largest_deltas_are_written(at_token: int) -> None:
    worker = WorkerInMemory(parsers=WithholdingParsers(DELTAS_BYTES_MAX, at_token))
    worker.work(parsing=PARSING)
    worker.step(out(ids=[5]))
    worker.step(out(ids=[6], finish_reason="stop"))
    (batch,) = worker.frames.take(1)
    (end,) = batch.frame.ends
    deltas = [delta for row in batch.frame.deltas for delta in row.deltas]
    assert sum(len(delta.text) for delta in [*deltas, *end.deltas]) == DELTAS_BYTES_MAX
    assert (end.kind, end.finish_reason) == (OutcomeKind.COMPLETED, "tool_calls")
    assert replace(end, deltas=()).seq == 2 and not worker.phases

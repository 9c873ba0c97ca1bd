"""How a worker parses the tokens of earlier attempts without being blocked by them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from schemas.errors import InvalidAnswer
from schemas.records import (
    AnswerDelta,
    DeltaKind,
    OutcomeKind,
    Parsing,
    PhaseKind,
    Sampling,
    TokenFrame,
    Work,
)
from schemas.rules.tokens import pack_tokens
from tests.waits import until
from tests.workers import fakes
from tests.workers.fakes import FakeEngine, out
from tests.workers.llm.worker_in_memory import DECODE, NOW_MS, PREFILL, WorkerInMemory
from tests.workers.running_worker import RunningWorker
from workers.llm.parsing.parsers import ParsedEnd
from workers.llm.parsing.replays import TURN_TOKENS_MAX

PRIOR = [10 + at % 400 for at in range(5 * TURN_TOKENS_MAX // 2)]  # three turns
PARSING = Parsing(tools="[]", tool_choice="auto")
REFUSED = 999


class CountingParser:
    """Writes after each token how many it has taken; it cannot read one token."""

    sampling, binds_reasoning, thinking_end = Sampling(max_tokens=99_999), False, ""

    def __init__(self, fed: list[int], turns: list[int]) -> None:
        self.tokens: list[int] = []
        self._fed, self._turns = fed, turns

    def feed(self, token_ids: Sequence[int]) -> list[AnswerDelta]:
        self._fed += token_ids
        self._turns.append(len(token_ids))
        self.tokens += token_ids
        if REFUSED in token_ids:
            raise InvalidAnswer("cannot be read")
        text = str(len(self.tokens))
        return [AnswerDelta(seq=len(self.tokens), kind=DeltaKind.CONTENT, text=text)]

    def finish(self, finish_reason: str) -> ParsedEnd:
        return ParsedEnd((), finish_reason, 0)


class CountingParsers:
    """Parsers that note all that they are fed."""

    def __init__(self) -> None:
        self.fed: list[int] = []
        self.turns: list[int] = []  # the number of tokens of each call

    def begin(self, work: Work, prompt: Sequence[int]) -> CountingParser:
        return CountingParser(self.fed, self.turns)


def continued(prior: Sequence[int] = PRIOR, **changes: Any) -> dict[str, Any]:
    """Fields of the work that continues an answer after these tokens."""
    return {
        "parsing": PARSING,
        "prompt_tokens": pack_tokens([1, 2, 3, *prior]),
        "prior_tokens": len(prior),
        "first_seq": len(prior),
        "sampling": Sampling(max_tokens=99_999),
        **changes,
    }


def contents(frame: TokenFrame) -> dict[str, str]:
    """The content in a frame, by request."""
    return {row.request_id: "".join(delta.text for delta in row.deltas) for row in frame.deltas}


def test_parser_takes_prior_tokens_in_parts_and_new_tokens_wait() -> None:
    parsers = CountingParsers()
    worker = WorkerInMemory(parsers=parsers)
    replays: list[str] = []
    worker.requests.on_replay = lambda: replays.append("due")
    worker.work("r1", **continued())
    worker.work("r2", parsing=PARSING)
    assert (parsers.turns, replays) == ([], ["due"]), "nothing is parsed as work arrives"
    worker.step(out("r1.1", ids=[5]), out("r2.1", ids=[7]))
    assert (parsers.turns, contents(worker.frame())) == ([1], {"r2": "1"}), "one waits"
    while worker.requests.catch_up(NOW_MS):
        worker.step(out("r1.1", ids=[6]), out("r2.1", ids=[7]))
    assert max(parsers.turns) == TURN_TOKENS_MAX
    r1_tokens = [token for token in parsers.fed if token != 7]
    new_count = len(r1_tokens) - len(PRIOR)
    assert r1_tokens == [*PRIOR, 5, *[6] * (new_count - 1)] and new_count > 2
    frame = worker.frame()
    expected = "".join(str(len(PRIOR) + number) for number in range(1, new_count + 1))
    assert contents(frame)["r1"] == expected
    assert not worker.requests.catch_up(NOW_MS), "it has caught up"
    worker.step(out("r1.1", ids=[8], finish_reason="stop"))
    (batch,) = worker.frames.take(NOW_MS)
    (end,) = batch.frame.ends
    assert (end.kind, end.seq) == (OutcomeKind.COMPLETED, len(PRIOR) + new_count + 1)


def test_kept_outputs_are_parsed_in_parts_too() -> None:
    """The end may arrive before its parser has caught up."""
    parsers = CountingParsers()
    worker = WorkerInMemory(parsers=parsers)
    worker.work("r1", **continued())
    new = [20 + at % 7 for at in range(2 * TURN_TOKENS_MAX)]
    for at in range(0, len(new), 64):
        worker.step(out("r1.1", ids=new[at : at + 64]))
    worker.step(out("r1.1", ids=[9], finish_reason="stop"))
    parsed = [0]
    while worker.requests.catch_up(NOW_MS):
        parsed.append(len(parsers.fed))
        assert parsed[-1] - parsed[-2] <= TURN_TOKENS_MAX
    assert parsers.fed == [*PRIOR, *new, 9]
    assert not len(worker.requests)


def test_answers_take_turns() -> None:
    parsers = CountingParsers()
    worker = WorkerInMemory(parsers=parsers)
    worker.work("r1", **continued([10] * 3 * TURN_TOKENS_MAX))
    worker.work("r2", **continued([11] * 2 * TURN_TOKENS_MAX))
    while worker.requests.catch_up(NOW_MS):
        pass
    assert parsers.fed[::TURN_TOKENS_MAX] == [10, 11, 10, 11, 10]


def test_answer_that_cannot_be_parsed_again_fails_alone() -> None:
    worker = WorkerInMemory(parsers=CountingParsers())
    worker.work("r1", **continued([*PRIOR, REFUSED]))
    worker.work("r2", **continued())
    while worker.requests.catch_up(NOW_MS):
        pass
    (phase,) = worker.phases
    assert (phase.request_id, phase.kind) == ("r1", PhaseKind.FAILED)
    assert phase.error is not None and phase.error.code == InvalidAnswer.code
    assert [work.request_id for work in worker.requests.works] == ["r2"]


def test_ended_request_is_not_parsed_further() -> None:
    parsers = CountingParsers()
    worker = WorkerInMemory(parsers=parsers)
    worker.work("r1", **continued(deadline_ms=NOW_MS + 5))
    assert worker.requests.catch_up(NOW_MS)
    worker.requests.expire(NOW_MS + 5)
    assert not worker.requests.catch_up(NOW_MS)
    assert len(parsers.fed) == TURN_TOKENS_MAX


def test_kept_first_token_frees_place_of_prompt() -> None:
    worker = WorkerInMemory(at_once=1, parsers=CountingParsers())
    worker.work("r1", PREFILL, **continued())
    worker.work("r2", PREFILL)
    assert len(worker.requests.prefill_gate) == 1
    worker.step(out("r1.1", ids=[5]))
    assert len(worker.requests.prefill_gate) == 0


async def test_loop_runs_between_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats and other streams have a turn at least every `TURN_TOKENS_MAX` tokens."""
    parsers, worker = CountingParsers(), RunningWorker()

    async def load(model: object) -> CountingParsers:
        return parsers

    async def engine(epoch: int) -> FakeEngine:
        return worker.engine

    monkeypatch.setattr("workers.runtime.load_parsers", load)
    await worker.start(engine)
    fed_at_turns: list[int] = [0]

    async def heartbeat() -> None:
        while True:
            fed_at_turns.append(len(parsers.fed))
            await asyncio.sleep(0)

    try:
        await worker.ready()
        beating = asyncio.create_task(heartbeat())
        prior = PRIOR * 8
        order = fakes.work("r1", DECODE, **continued(prior))
        await worker.submit(order)
        worker.engine.say(out(ids=[5]))
        await until(lambda: worker.log.of(TokenFrame) != [])
        beating.cancel()
    finally:
        worker.stop.set()
        assert worker.task is not None
        worker.task.cancel()
        await asyncio.gather(worker.task, return_exceptions=True)
    assert parsers.fed == [*prior, 5]
    steps = [after - before for before, after in zip(fed_at_turns, fed_at_turns[1:], strict=False)]
    assert max(steps) == TURN_TOKENS_MAX

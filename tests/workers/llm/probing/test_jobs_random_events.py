"""Whatever happens in whichever order, an answer that searches is one that can be made again."""

import re
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import Insert, Retrieved, Sampling
from schemas.rules.tokens import pack_tokens, unpack_tokens
from tests.workers.fakes import work
from tests.workers.llm.probing.probes import passage, probes, search_result
from workers.llm.engine import Job, Output
from workers.llm.pieces import texts_of
from workers.llm.probing.jobs import ProbingJobs

PROMPT = [1, 2, 3]
MOST = 40


LACKS = "\ufffd"


def text(token_ids: Sequence[int]) -> str:
    """Every fifth token is the first half of a character."""
    raw_text = "".join(f"<{token}>" if token % 5 else LACKS for token in token_ids)
    return re.sub(f"{LACKS}+(?=.)", "", raw_text)


class ToyEngine:
    """One whose every token follows from all tokens before it; some have no text by themselves."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.tokens_left: dict[str, int] = {}
        self.prompts: dict[str, int] = {}

    def add(self, job: Job) -> None:
        self.tokens[job.request_id] = list(job.prompt_tokens)
        self.prompts[job.request_id] = len(job.prompt_tokens)
        self.tokens_left[job.request_id] = job.sampling.max_tokens

    def abort(self, request_id: str) -> None:
        self.tokens_left.pop(request_id, None)

    def texts(self, before: Sequence[int], output: Output) -> list[str]:
        return texts_of(text, before, output)

    def step(self, count: int) -> list[Output]:
        """So many tokens of each job at most."""
        outputs = []
        for job_id, tokens_left in list(self.tokens_left.items()):
            tokens, new = self.tokens[job_id], list[int]()
            text_before = text(tokens[self.prompts[job_id] :]).rstrip(LACKS)
            while tokens_left and len(new) < count:
                tokens.append(10 + crc32(pack_tokens(tokens)) % 400)
                new.append(tokens[-1])
                tokens_left -= 1
            self.tokens_left[job_id] = tokens_left
            new_text = text(tokens[self.prompts[job_id] :]).rstrip(LACKS)[len(text_before) :]
            if not tokens_left:
                del self.tokens_left[job_id]
            outputs.append(
                Output(
                    request_id=job_id,
                    token_ids=new,
                    text=new_text,
                    finish_reason="" if tokens_left else "length",
                )
            )
        return outputs


class Run:
    """One attempt; `written` is what stands in the log."""

    def __init__(self, attempt: int, before: list[Retrieved], stall_ms: int) -> None:
        self.engine, self.now_ms = ToyEngine(), 1_000
        self.asks: list[Any] = []
        self.unwritten: list[Retrieved] = []
        self.written: list[Retrieved] = []
        self.sent_tokens: list[int] = []
        self.is_over = False
        self.probing = ProbingJobs(self.engine, self.asks.append, self.unwritten.append)
        inserts = [Insert(at=record.seq, tokens=record.tokens) for record in before]
        wishes = probes(inserts, len(before), every=5, lookahead=3, stall_ms=stall_ms, probes_max=4)
        self._before = {record.probe: record for record in before}
        job_id = f"r1.{attempt}"
        order = work("r1", attempt=attempt, probes=wishes, sampling=Sampling(max_tokens=MOST))
        job = Job(
            request_id=job_id,
            phase=order.phase,
            prompt_tokens=PROMPT,
            sampling=order.sampling,
            deadline_ms=order.deadline_ms,
            work=order,
        )
        self.probing.add(job)

    def hear(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.request_id.startswith("r1.") and "+" not in output.request_id:
                assert not self.is_over
                self.sent_tokens += output.token_ids
                self.is_over = bool(output.finish_reason)
        for record in self.unwritten:
            assert len(self.sent_tokens) <= record.seq, (
                "a token left before its probe was in the log"
            )

    def happen(self, what: int) -> None:
        """One of the things that may happen next."""
        self.now_ms += what
        if what < 3:
            self.hear(list(self.probing.step(self.engine.step(what + 1), self.now_ms)))
        elif what < 5 and self.asks:
            ask = self.asks.pop(0)
            assert ask.probe not in self._before, "asked again"
            name = f"p{ask.probe}"
            passages = [passage(name, 500 + ask.probe, 600)] if what == 3 else []
            self.hear(self.probing.take_result(search_result(ask, *passages), (), self.now_ms))
        elif what == 5 and self.unwritten:
            record = self.unwritten.pop(0)
            self.written.append(record)
            self.hear(self.probing.record_written(record, self.now_ms))
        elif what == 6:
            self.hear(self.probing.wake(self.now_ms))

    def finish(self) -> None:
        """The rest, in some order."""
        for what in [*range(7)] * 200:
            if self.is_over:
                return
            self.happen(what)
        raise AssertionError("the answer does not end")


def answer_from_log(records: list[Retrieved]) -> list[int]:
    """The answer, made from the log alone."""
    tokens, answer = list(PROMPT), list[int]()
    inserts = {record.seq: unpack_tokens(record.tokens) for record in records if record.tokens}
    while len(answer) < MOST:
        tokens += inserts.get(len(answer), [])
        tokens.append(10 + crc32(pack_tokens(tokens)) % 400)
        answer.append(tokens[-1])
    return answer


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=120), st.integers(0, 30), st.integers(0, 200))
def test_sent_tokens_match_log_in_every_attempt(
    happened: list[int], stall_ms: int, ends_after: int
) -> None:
    """An attempt ends somewhere, and a later one continues from the log."""
    first = Run(1, [], stall_ms)
    for what in happened[:ends_after]:
        if not first.is_over:
            first.happen(what)
    second = Run(2, first.written, stall_ms)
    for what in reversed(happened):
        if not second.is_over:
            second.happen(what)
    second.finish()
    whole = answer_from_log([*first.written, *second.written])
    assert second.sent_tokens == whole
    assert first.sent_tokens == whole[: len(first.sent_tokens)]
    assert len(first.written) + len(second.written) <= 4

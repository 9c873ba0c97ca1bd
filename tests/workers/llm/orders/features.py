"""What an order of prefill and decode has to leave as it is: one check per row of the page.

Each check gets two engines and an order, and compares with one engine that computes the whole
answer. `tests/workers/llm/orders/test_page.py` runs those that `infra/docs/orders.md` promises.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from schemas.records import KvHandle, Orchestration, Structured, StructuredKind
from schemas.rules.tokens import pack_tokens
from streams.log.clock import wall_ms
from tests.waits import until
from tests.workers.llm.engine_pair import EnginePair
from tests.workers.llm.engines import (
    PREFILL,
    Answer,
    answered,
    collected,
    job,
    paired_jobs,
    prompt,
)
from tests.workers.llm.probing.engine_probing import Searched, searched
from tests.workers.llm.probing.probes import passage, probes
from workers.llm.engine import Engine, Job, Output

Attempt = tuple[Job, Job]  # prefill's job and decode's
FIRST = Orchestration.PREFILL_FIRST
TOO_LONG = "context_length_exceeded"
LATE_MS = 200  # until a deadline that 1 900 tokens do not keep
_FORMS = {
    StructuredKind.CHOICE: '["left", "right"]',
    StructuredKind.REGEX: "[0-9]{4}-[0-9]{2}",
    StructuredKind.JSON_SCHEMA: '{"type": "object", "properties": {"ok": {"type": "boolean"}}, '
    '"required": ["ok"], "additionalProperties": false}',
}


@dataclass
class Order:
    """Two engines that work in one order."""

    pair: EnginePair
    order: Orchestration
    salt: int  # of prompts that no other check has

    @property
    def prefill(self) -> Engine:
        engine: Engine = self.pair.producer
        return engine

    @property
    def decode(self) -> Engine:
        engine: Engine = self.pair.consumer
        return engine

    def prompt(self, tokens: int) -> list[int]:
        self.salt += 1
        return prompt(tokens, self.salt)

    def attempt(self, tokens: Sequence[int], **fields: Any) -> Attempt:
        """Both jobs. In prefill_first decode's has its handle when prefill is done."""
        if self.order is not FIRST:
            return paired_jobs(self.prefill, self.decode, tokens, self.order, **fields)
        prefill_job = job(tokens, PREFILL, orchestration=FIRST, **fields)
        fields.setdefault("request_id", prefill_job.request_id)
        return prefill_job, job(tokens, orchestration=FIRST, **fields)

    async def handles(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """What has to come before both sides can run: the KV, or room for it."""
        if self.order is FIRST:
            prefill_answers = await collected(
                self.prefill, *(prefill_job for prefill_job, _ in attempts)
            )
            assert all(answer.last.finish_reason == "handover" for answer in prefill_answers), (
                prefill_answers
            )
            return [
                (prefill_job, replace(decode_job, kv=answer.last.kv))
                for (prefill_job, decode_job), answer in zip(attempts, prefill_answers, strict=True)
            ]
        if self.order is Orchestration.CONCURRENT:
            return [*attempts]
        targets: dict[str, KvHandle] = {}
        for _, decode_job in attempts:
            self.decode.add(decode_job)
        while len(targets) < len(attempts):
            for output in await self.decode.outputs():
                assert not output.finish_reason, output
                assert output.kv is not None
                targets[output.request_id] = output.kv
        return [
            (replace(prefill_job, kv_target=targets[prefill_job.request_id]), decode_job)
            for prefill_job, decode_job in attempts
        ]

    async def run(self, *attempts: Attempt) -> list[Answer]:
        """Decode's answers of attempts that run beside each other."""
        ready = await self.handles(attempts)
        decodes = [decode_job for _, decode_job in ready]
        if self.order is FIRST:
            return await collected(self.decode, *decodes)
        add = self.order is Orchestration.CONCURRENT
        prefill_answers, answers = await asyncio.gather(
            collected(self.prefill, *(prefill_job for prefill_job, _ in ready)),
            collected(self.decode, *decodes, add=add),
        )
        assert all(answer.last.finish_reason == "handover" for answer in prefill_answers), (
            prefill_answers
        )
        return answers

    def answer(self, tokens: Sequence[int], **fields: Any) -> Answer:
        (answer,) = self.pair.run(self.run(self.attempt(tokens, **fields)))
        assert isinstance(answer, Answer)
        return answer

    def alone(self, tokens: Sequence[int], **fields: Any) -> Answer:
        answer: Answer = self.pair.run(answered(self.prefill, job(tokens, **fields)))
        return answer

    async def calm(self) -> None:
        """Until neither engine computes anything."""
        for engine in (self.prefill, self.decode):
            await until(lambda engine=engine: not engine.load().running)

    def goes_on(self) -> None:
        """Whatever was wrong before, the next answer is right."""
        self.pair.run(self.calm())
        tokens = self.prompt(40)
        assert self.answer(tokens).token_ids == self.alone(tokens).token_ids


class EngineTap:
    """An engine whose outputs somebody else hears, too."""

    def __init__(self, engine: Engine, hear: Callable[[Output], None]) -> None:
        self._engine, self._hear = engine, hear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def outputs(self) -> Sequence[Output]:
        outputs = await self._engine.outputs()
        for output in outputs:
            self._hear(output)
        return outputs


def same_answer(on: Order) -> None:
    for sampling in ({}, {"temperature": 0.9, "seed": 7}):
        tokens = on.prompt(70)
        answer, alone = (run(tokens, max_tokens=20, **sampling) for run in (on.answer, on.alone))
        assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)
        assert answer.last.finish_reason == "length"


def structured_output(on: Order) -> None:
    for kind, value in _FORMS.items():
        fields = {"structured": Structured(kind=kind, value=value), "ignore_eos": False}
        tokens = on.prompt(40)
        answer, alone = (run(tokens, max_tokens=40, **fields) for run in (on.answer, on.alone))
        assert (answer.text, answer.last.finish_reason) == (alone.text, "stop"), kind


def logprobs(on: Order) -> None:
    tokens = on.prompt(40)
    entries, expected = (
        [entry for output in run(tokens, logprobs=2).outputs for entry in output.logprobs]
        for run in (on.answer, on.alone)
    )
    assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected]
    for entry, expected_entry in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(expected_entry.logprob, abs=1e-3)
        assert [top.token_id for top in entry.top] == [top.token_id for top in expected_entry.top]


def stop_strings(on: Order) -> None:
    """Also one that begins with the token that prefill draws."""
    tokens = on.prompt(40)
    whole, first = (on.alone(tokens, max_tokens=count).text for count in (16, 1))
    for begin in (len(first) - 1, len(whole) // 2):
        stop = whole[begin : begin + 4]
        for include_stop in (False, True):
            answer = on.answer(tokens, max_tokens=16, stop=(stop,), include_stop=include_stop)
            end = whole.index(stop) + (len(stop) if include_stop else 0)
            assert answer.text == whole[:end]
            assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)


def several_choices(on: Order) -> None:
    """`n` choices of one prompt, at once; each is a request of its own."""
    tokens = on.prompt(50)
    fields = [{"temperature": 1.0, "seed": seed, "max_tokens": 8 + seed} for seed in range(3)]
    answers = on.pair.run(on.run(*(on.attempt(tokens, **sampling) for sampling in fields)))
    assert [answer.token_ids for answer in answers] == [
        on.alone(tokens, **sampling).token_ids for sampling in fields
    ]


def searches_meanwhile(on: Order) -> None:
    """Probes: the answer goes on behind what a search has found."""
    tokens = on.prompt(40)
    lead, joint, trail = (pack_tokens([token]) for token in (20, 21, 22))
    wish = probes(probes_max=2, lead=lead, joint=joint, trail=trail)

    async def together() -> Searched:
        prefill_job, decode_job = on.attempt(
            tokens, request_id=f"probed-{on.salt}.1", max_tokens=20
        )
        if on.order is FIRST:
            ((_, decode_job),) = await on.handles([(prefill_job, decode_job)])
        allocation = asyncio.get_running_loop().create_future()

        def hear(output: Output) -> None:
            if output.kv is not None and not output.finish_reason and not allocation.done():
                allocation.set_result(output.kv)

        async def prefill() -> None:
            if on.order is FIRST:
                return
            target = prefill_job.kv_target
            if on.order is Orchestration.DECODE_FIRST:
                target = await allocation
            await answered(on.prefill, replace(prefill_job, kv_target=target))

        engine_tap: Any = EngineTap(on.decode, hear)
        whole = replace(decode_job, request_id=decode_job.request_id.removesuffix(".1"))
        _, answer = await asyncio.gather(prefill(), searched(engine_tap, whole, wish, finds))
        return answer

    def finds(ask: Any) -> list[Any]:
        return [passage(f"p{ask.probe}", 70 + ask.probe, 71)]

    answer = on.pair.run(together())
    alone = on.pair.run(searched(on.prefill, job(tokens, max_tokens=20), wish, finds))
    assert answer.token_ids == alone.token_ids
    assert [record.seq for record in answer.records] == [record.seq for record in alone.records]
    assert any(record.passages for record in answer.records)


def goes_on_where_it_stopped(on: Order) -> None:
    """A later attempt, behind what the former one has said."""
    tokens = on.prompt(40)
    whole = on.alone(tokens, max_tokens=16).token_ids
    rest = on.answer([*tokens, *whole[:6]], prior_tokens=6, max_tokens=16)
    assert rest.token_ids == whole[6:]


def prefix_of_a_turn_before(on: Order) -> None:
    """Only what decode lacks is moved."""
    first = on.prompt(300)
    before = on.answer(first)
    second = [*first, *before.token_ids, *on.prompt(20)]
    later = on.answer(second)
    assert 0 < later.outputs[0].kv_bytes < before.outputs[0].kv_bytes
    assert later.token_ids == on.alone(second).token_ids


def all_kv_is_held(on: Order) -> None:
    """Decode has computed the same prompt: whole blocks, and one token more."""
    for extra in (0, 1):
        tokens = on.prompt(4 * on.decode.capability.block_size + extra)
        expected = on.alone(tokens).token_ids
        first, second = on.answer(tokens), on.answer(tokens)
        assert first.token_ids == second.token_ids == expected
        assert second.outputs[0].kv_bytes < first.outputs[0].kv_bytes


def error_of_prefill(on: Order) -> None:
    """It refuses the prompt. Decode, if it has begun, is told to stop, and does."""

    async def main() -> None:
        prefill_job, decode_job = on.attempt(on.prompt(60), max_tokens=8)
        if on.order is not FIRST:
            ((prefill_job, decode_job),) = await on.handles([(prefill_job, decode_job)])
        answer = await answered(
            on.prefill, replace(prefill_job, prompt_tokens=too_long(on.prefill))
        )
        assert (answer.last.finish_reason, answer.error_code) == ("error", TOO_LONG)
        if on.order is not FIRST:
            await _stopped(on, decode_job)

    on.pair.run(main())
    on.goes_on()


def error_of_decode(on: Order) -> None:
    """A prompt that does not fit is refused at once, and a deadline ends what runs."""
    refused: Answer = on.pair.run(answered(on.decode, job(too_long(on.decode))))
    assert refused.error_code == TOO_LONG

    async def late() -> Answer:
        prefill_job, decode_job = on.attempt(on.prompt(60), max_tokens=1_900)
        decode_job = replace(decode_job, deadline_ms=wall_ms() + LATE_MS)
        ((prefill_job, decode_job),) = await on.handles([(prefill_job, decode_job)])
        if on.order is FIRST:
            return await answered(on.decode, decode_job)
        add = on.order is Orchestration.CONCURRENT
        _, (answer,) = await asyncio.gather(
            answered(on.prefill, prefill_job), collected(on.decode, decode_job, add=add)
        )
        return answer

    answer: Answer = on.pair.run(late())
    assert (answer.last.finish_reason, answer.error_code) == ("error", "deadline_exceeded")
    on.goes_on()


def too_long(engine: Engine) -> list[int]:
    return [5] * (engine.capability.max_model_len + 1)


def cancelled_in_prefill(on: Order) -> None:
    """While the prompt is computed."""

    async def main() -> None:
        prefill_job, decode_job = on.attempt(on.prompt(600), max_tokens=8)
        if on.order is not FIRST:
            ((prefill_job, decode_job),) = await on.handles([(prefill_job, decode_job)])
        on.prefill.add(prefill_job)
        on.prefill.abort(prefill_job.request_id)
        (answer,) = await collected(on.prefill, prefill_job, add=False)
        assert answer.last.finish_reason == "abort"
        if on.order is not FIRST:
            await _stopped(on, decode_job)

    on.pair.run(main())
    on.goes_on()


def cancelled_at_the_hand_over(on: Order) -> None:
    """KV waits for decode, or decode for KV that never comes."""

    async def main() -> None:
        ((prefill_job, decode_job),) = await on.handles([on.attempt(on.prompt(60), max_tokens=8)])
        if on.order is FIRST:
            on.prefill.abort(prefill_job.request_id)
            await until(lambda: not on.prefill.load().kv_handles_held)
        else:
            await _stopped(on, decode_job)

    on.pair.run(main())
    on.goes_on()


def cancelled_in_decode(on: Order) -> None:
    """While the answer is generated."""

    async def main() -> None:
        ((prefill_job, decode_job),) = await on.handles(
            [on.attempt(on.prompt(60), max_tokens=1_500)]
        )
        if on.order is not Orchestration.DECODE_FIRST:
            on.decode.add(decode_job)
        if on.order is not FIRST:
            on.prefill.add(prefill_job)
        while not any(output.token_ids for output in await on.decode.outputs()):
            pass
        on.decode.abort(decode_job.request_id)
        (answer,) = await collected(on.decode, decode_job, add=False)
        assert answer.last.finish_reason == "abort"
        if on.order is not FIRST:
            (prefill_answer,) = await collected(on.prefill, prefill_job, add=False)
            assert prefill_answer.last.finish_reason == "handover"

    on.pair.run(main())
    on.goes_on()


async def _stopped(on: Order, decode_job: Job) -> None:
    """Decode's job, which waits for KV, is given up."""
    if on.order is Orchestration.CONCURRENT:
        on.decode.add(decode_job)
    on.decode.abort(decode_job.request_id)
    (answer,) = await collected(on.decode, decode_job, add=False)
    assert answer.last.finish_reason == "abort"


FEATURES: dict[str, Callable[[Order], None]] = {
    "the answer of one engine alone, greedy and drawn": same_answer,
    "structured output: a schema, a pattern, a choice": structured_output,
    "logprobs, the first token's too": logprobs,
    "stop strings, also across the hand-over": stop_strings,
    "`n` choices of one prompt at once": several_choices,
    "probes: searches while the answer is generated": searches_meanwhile,
    "an attempt that goes on where another stopped": goes_on_where_it_stopped,
    "a later turn moves what decode lacks, and no more": prefix_of_a_turn_before,
    "KV that decode holds as a whole": all_kv_is_held,
    "an error of prefill": error_of_prefill,
    "an error of decode": error_of_decode,
    "cancelled while the prompt is computed": cancelled_in_prefill,
    "cancelled at the hand-over": cancelled_at_the_hand_over,
    "cancelled while the answer is generated": cancelled_in_decode,
}

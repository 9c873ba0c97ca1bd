"""The vLLM engine beyond the contract: hand-overs that go wrong, figures, and engines that die.

One prefill and one decode engine for all tests; the last tests end them.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import EngineDead
from schemas.log.clock import wall_ms
from schemas.records import KvHandle, Structured, StructuredKind
from tests.waiting import until
from tests.workers.engines import (
    PREFILL,
    Answer,
    answered,
    collected,
    handed_over,
    job,
    prompt,
    start_vllm,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]


@dataclass
class Engines:
    """The two engines, their processes, and the loop that they live in."""

    runner: asyncio.Runner
    producer: Any
    consumer: Any
    producer_pid: int
    consumer_pid: int

    def run(self, main: Any) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(60):
                return await main

        return self.runner.run(limited())

    def alone(self, tokens: list[int], **sampling: Any) -> Answer:
        """What the consumer answers without a hand-over."""
        answer: Answer = self.run(answered(self.consumer, job(tokens, **sampling)))
        return answer

    def extra(self, name: str) -> float:
        found: float = self.consumer.load().extra[name]
        return found


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with asyncio.Runner() as runner:

        async def started() -> tuple[Any, Any]:
            return await asyncio.gather(start_vllm(), start_vllm(progress_timeout_ms=3_000))

        producer, consumer = runner.run(started())
        yield Engines(runner, producer, consumer, _core(producer), _core(consumer))
        runner.run(consumer.close())
        runner.run(producer.close())


def _core(engine: Any) -> int:
    """vLLM's engine process, the parent of the compute process."""
    (core,) = engine._llm.engine_core.resources.engine_manager.processes
    return int(core.pid)


def handle(engines: Engines, tokens: list[int], **sampling: Any) -> KvHandle:
    """A fresh handle of the producer."""
    one = engines.run(answered(engines.producer, job(tokens, PREFILL, **sampling)))
    assert one.last.kv is not None, one.last
    kv: KvHandle = one.last.kv
    return kv


def test_many_at_once(engines: Engines) -> None:
    """Hand-overs both ways and plain requests, all on the same two engines."""

    async def main() -> list[tuple[list[int], list[int]]]:
        prompts = [prompt(30 + 40 * i, salt=200 + i) for i in range(6)]
        p, d = engines.producer, engines.consumer
        pairs = [handed_over(*((p, d) if i % 2 else (d, p)), t) for i, t in enumerate(prompts)]
        over = [await pair for pair in pairs]
        alone = await collected(p, *[job(t) for t in prompts])
        return [(pair[1].token_ids, one.token_ids) for pair, one in zip(over, alone, strict=True)]

    for over, alone in engines.run(main()):
        assert over == alone


def test_bytes_are_counted_and_cached_tokens_are_ones_own(engines: Engines) -> None:
    tokens = prompt(300, salt=210)
    before = engines.consumer.load().kv_bytes_received
    _, decoded = engines.run(handed_over(engines.producer, engines.consumer, tokens))
    first = decoded.outputs[0]
    block_bytes = 32 * 2 * 4 * 4 * 32 * 4  # tokens, K and V, layers, heads, size, float32
    assert first.kv_bytes == 10 * block_bytes
    assert first.transfer_ms > 0
    assert first.cached_tokens == 0
    assert engines.consumer.load().kv_bytes_received - before == first.kv_bytes
    longer = [*tokens, *decoded.token_ids, *prompt(30, salt=211)]
    _, again = engines.run(handed_over(engines.producer, engines.consumer, longer))
    assert again.outputs[0].cached_tokens == 288
    assert again.outputs[0].kv_bytes == 2 * block_bytes


@pytest.mark.parametrize(
    "bad",
    [
        {"remote_block_ids": None},
        {"remote_request_id": None},
        {"remote_host": 7},
        {"remote_block_ids": [[0, 1, 2]]},
        {"do_remote_prefill": False},
    ],
)
def test_malformed_handles_never_reach_the_engine(engines: Engines, bad: dict[str, Any]) -> None:
    tokens = prompt(50, salt=212)
    kv = handle(engines, tokens)
    refused = engines.extra("kv_refused_total")
    params = {**json.loads(kv.params), **bad}
    broken = replace(kv, params=json.dumps(params).encode())
    answer = engines.run(answered(engines.consumer, job(tokens, kv=broken)))
    assert answer.token_ids == engines.alone(tokens).token_ids
    assert engines.extra("kv_refused_total") == refused + 1
    engines.producer.abort(kv.engine_request_id[:-9])  # else its lease holds the memory for long


def test_a_read_that_ends_too_late_is_not_trusted(engines: Engines) -> None:
    tokens = prompt(70, salt=213)
    kv = handle(engines, tokens)
    late = engines.extra("kv_late_total")
    brief = replace(kv, expires_at_ms=wall_ms() + 3)
    answer = engines.run(answered(engines.consumer, job(tokens, kv=brief)))
    assert answer.token_ids == engines.alone(tokens).token_ids
    assert not any(output.kv_bytes for output in answer.outputs)
    assert engines.extra("kv_late_total") == late + 1


def test_a_stop_string_across_the_hand_over(engines: Engines) -> None:
    tokens = prompt(40, salt=214)
    whole = engines.alone(tokens, max_tokens=16)
    first = whole.outputs[0].text
    stop = whole.text[len(first) - 2 : len(first) + 3]
    prefilled, decoded = engines.run(
        handed_over(engines.producer, engines.consumer, tokens, max_tokens=16, stop=(stop,))
    )
    assert decoded.text == whole.text[: whole.text.index(stop)]
    assert decoded.text.startswith(prefilled.text)
    assert decoded.last.stop_reason == stop


def test_an_answer_that_stops_at_once_is_not_handed_over(engines: Engines) -> None:
    tokens = prompt(40, salt=215)
    first = engines.alone(tokens).token_ids[0]

    async def main() -> Answer:
        one = job(tokens, PREFILL, stop_token_ids=(first,))
        answer = await answered(engines.producer, one)
        await until(lambda: not engines.producer.load().kv_blocks_used)  # and holds no memory
        return answer

    answer: Answer = engines.run(main())
    assert (answer.last.finish_reason, answer.last.kv) == ("stop", None)


def test_an_abandoned_hand_over_is_freed_at_once(engines: Engines) -> None:
    async def main() -> None:
        one = job(prompt(200, salt=216), PREFILL)
        assert (await answered(engines.producer, one)).last.kv is not None
        assert engines.producer.load().extra["kv_handles_held"] >= 1
        assert engines.producer.load().kv_blocks_used > 0
        engines.producer.abort(one.request_id)
        await until(lambda: engines.producer.load().extra["kv_handles_held"] == 0, seconds=5)
        assert engines.producer.load().kv_blocks_used == 0

    engines.run(main())


@pytest.mark.parametrize(
    ("kind", "value", "check"),
    [
        (StructuredKind.CHOICE, '["left", "right"]', lambda text: text in ("left", "right")),
        (StructuredKind.REGEX, "[0-9]{4}-[0-9]{2}", lambda text: text[:4].isdigit()),
        (
            StructuredKind.JSON_SCHEMA,
            '{"type": "object", "properties": {"ok": {"type": "boolean"}}, '
            '"required": ["ok"], "additionalProperties": false}',
            lambda text: set(json.loads(text)) == {"ok"},
        ),
    ],
)
def test_structured_answers_are_handed_over(
    engines: Engines, kind: StructuredKind, value: str, check: Any
) -> None:
    sampling = {"structured": Structured(kind=kind, value=value), "max_tokens": 40}
    tokens = prompt(40, salt=217)
    prefilled, decoded = engines.run(
        handed_over(engines.producer, engines.consumer, tokens, **sampling, ignore_eos=False)
    )
    assert check(decoded.text)
    assert decoded.token_ids[:1] == prefilled.token_ids


def test_logprobs_do_not_change_by_a_hand_over(engines: Engines) -> None:
    tokens = prompt(40, salt=218)
    _, decoded = engines.run(handed_over(engines.producer, engines.consumer, tokens, logprobs=2))
    alone = engines.alone(tokens, logprobs=2)
    found, wanted = (
        [entry for output in one.outputs for entry in output.logprobs] for one in (decoded, alone)
    )
    assert [entry.token_id for entry in found] == [entry.token_id for entry in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [top.token_id for top in ours.top] == [top.token_id for top in theirs.top]
        assert len(ours.top) == 2


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 3.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -7},
        {"min_p": 2.0},
        {"presence_penalty": 3.0},
        {"repetition_penalty": 0.0},
        {"logprobs": 10_000},
        {"stop": ("",)},
        {"stop_token_ids": (99_999,), "min_tokens": 2},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {"99999": 1.0}},
        {"bad_words": ("",)},
        {"structured": Structured(kind=StructuredKind.REGEX, value="(")},
        {"structured": Structured(kind=StructuredKind.JSON_SCHEMA, value="{")},
        {"structured": Structured(kind=StructuredKind.CHOICE, value="7")},
        {"structured": Structured(kind=StructuredKind.GRAMMAR, value="root ::= (")},
    ],
)
def test_bad_sampling_is_the_clients_fault(engines: Engines, sampling: dict[str, Any]) -> None:
    one = replace(job([5, 6, 7]), sampling=replace(job([5]).sampling, **sampling))
    answer = engines.run(answered(engines.consumer, one))
    assert (answer.last.finish_reason, answer.error_code) == ("error", "invalid_request")
    assert engines.alone([5, 6, 7]).last.finish_reason == "length"


def test_other_sampling_reaches_vllm(engines: Engines) -> None:
    tokens = prompt(30, salt=219)
    plain = engines.alone(tokens).token_ids
    biased = engines.alone(tokens, logit_bias={str(plain[0]): -100.0}).token_ids
    assert biased[0] != plain[0]
    assert engines.alone(tokens, logit_bias={"1": 100.0}, ignore_eos=False).token_ids == [1]


def test_idle_engines_leave_the_cores_alone(engines: Engines) -> None:
    """The plugin's main promise: the two engines together take less than a fifth of a core."""
    pids = _family(engines.producer_pid) + _family(engines.consumer_pid)

    async def main() -> float:
        await asyncio.get_running_loop().run_in_executor(None, _quiet_s, pids)
        before = _cpu_s(pids)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await asyncio.Event().wait()
        return (_cpu_s(pids) - before) / 2

    assert engines.run(main()) < 0.2


def test_a_producer_that_died_costs_only_time(engines: Engines) -> None:
    tokens = prompt(90, salt=220)
    one = job(tokens, PREFILL, max_tokens=12)
    kv = engines.run(answered(engines.producer, one)).last.kv
    os.kill(engines.producer_pid, signal.SIGKILL)

    async def dead() -> None:
        with pytest.raises(EngineDead):
            await engines.producer.outputs()
        late = await _error_of(engines.producer, job(tokens))
        assert late == "engine_dead"

    engines.run(dead())
    answer = engines.run(answered(engines.consumer, job(tokens, request_id=one.request_id, kv=kv)))
    assert answer.last.finish_reason == "length"
    assert answer.outputs[0].kv_bytes == 0
    assert engines.extra("kv_recomputed_total") == 1
    assert answer.token_ids == engines.alone(tokens).token_ids


def test_a_frozen_engine_is_noticed_and_may_go_on(engines: Engines) -> None:
    family = _family(engines.consumer_pid)

    async def main() -> str:
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        try:
            answer = await answered(engines.consumer, job(prompt(40, salt=221)))
        finally:
            for pid in family:
                os.kill(pid, signal.SIGCONT)
        return answer.error_code

    assert engines.run(main()) == "no_progress"
    assert engines.alone(prompt(40, salt=222)).last.finish_reason == "length"


def test_a_killed_engine_is_dead(engines: Engines) -> None:
    async def main() -> None:
        engines.consumer.add(job(prompt(20), max_tokens=1_500))
        while not any(output.token_ids for output in await engines.consumer.outputs()):
            pass
        os.kill(_family(engines.consumer_pid)[-1], signal.SIGKILL)  # its compute process
        with pytest.raises(EngineDead, match="processes are gone"):
            while True:
                await engines.consumer.outputs()

    engines.run(main())


def test_nothing_outlives_a_killed_owner() -> None:
    code = (
        "import asyncio, sys\n"
        "from tests.workers.engines import start_vllm\n"
        "async def main():\n"
        "    engine = await start_vllm(kv_transfer='off')\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    script = Path(os.environ["TRIVIUM_HOME"]) / "owner.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    ) as owner:
        assert owner.stdout is not None
        while owner.stdout.readline() not in (b"ready\n", b""):
            pass
        family = _family(owner.pid)[1:]
        assert len(family) >= 2
        owner.kill()
    asyncio.run(until(lambda: not any(_lives(pid) for pid in family), seconds=10))


async def _error_of(engine: Any, one: Any) -> str:
    """The code of the error that a dead engine answers a job with, before it raises again."""
    engine.add(one)
    outputs = await engine.outputs()
    return str(outputs[0].error.code)


def _family(pid: int) -> list[int]:
    """A process and all that descend from it, parents first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    threads = [
        child
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]
    found = [pid]
    for child in (*children, *threads):
        found += _family(int(child))
    return found


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def _cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _quiet_s(pids: list[int]) -> None:
    """Wait until the engines have settled after the last test."""
    before = _cpu_s(pids)
    for _ in range(20):
        multiprocessing.connection.wait([], timeout=0.25)
        now = _cpu_s(pids)
        if now - before < 0.03:
            return
        before = now

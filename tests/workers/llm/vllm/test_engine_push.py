"""vLLM engines that push: prefill writes, and both sides may start at once.

One pair of engines for all tests. Margins are short, so that giving up is quick.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import prometheus_client
import pytest
from zmq.asyncio import Context
from zmq.constants import SocketType

from schemas.log.clock import wall_ms
from schemas.records import KvHandle, Orchestration
from tests.waiting import until
from tests.workers.kv.sockets import listening
from tests.workers.llm.engine_pair import EnginePair
from tests.workers.llm.engines import (
    PREFILL,
    Answer,
    answered,
    collected,
    handed_over,
    job,
    prompt,
    start_vllm,
)
from tests.workers.processes import family
from workers.llm.engine import Engine, Job
from workers.llm.vllm import endings as vllm_endings
from workers.llm.vllm import engine as vllm_engine
from workers.llm.vllm.settings import VllmSettings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_800)]  # two engines start
MARGIN_MS = 500
BLOCK_BYTES = 32 * 2 * 4 * 4 * 32 * 4  # tokens, K and V, layers, heads, size, float32


class Engines(EnginePair):
    """Each has one side of most attempts."""

    @property
    def prefill(self) -> Any:
        return self.producer

    @property
    def decode(self) -> Any:
        return self.consumer

    def alone(self, tokens: list[int], **sampling: Any) -> Answer:
        answer: Answer = self.run(answered(self.prefill, job(tokens, **sampling)))
        return answer


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    found = Engines.started(partial(start_vllm, kv_transfer="push", handle_margin_ms=MARGIN_MS))
    pair = (found.prefill, found.decode)
    known = {each.capability.engine_id: each.capability.nixl_metadata for each in pair}
    for each in pair:
        each.set_peer_metadata(known.get)
    yield found
    found.close()


def test_engines_share_no_metrics(engines: Engines) -> None:
    """vLLM's own are registered for a whole process, so engines that start at once would clash."""
    assert not any("vllm" in name for name in prometheus_client.REGISTRY._names_to_collectors)


def test_nobody_beyond_this_machine_reaches_an_engine(engines: Engines) -> None:
    """By the kernel's table of sockets: an engine's processes and who drives it (issue 10, 19)."""
    pids = [os.getpid()]
    for engine in (engines.prefill, engines.decode):
        (core,) = engine._llm.engine_core.resources.engine_manager.processes
        pids += family(core.pid)
    found = set[Any]().union(*map(listening, pids))
    assert found
    assert [(table, str(host)) for table, host in found if not host.is_loopback] == []


def test_where_an_engine_listens_is_told_unless_the_environment_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(issue 10, 19)"""
    told = {
        "UCX_NET_DEVICES": "eth1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    environment = import_module("workers.llm.vllm.launch").environment
    settings = VllmSettings(kv_devices="eth1")
    for name in told:
        monkeypatch.delenv(name, raising=False)
    assert told.items() <= environment(settings, side_channel_port=0).items()
    for name in told:
        monkeypatch.setenv(name, "eth2")
    found = environment(settings, side_channel_port=0)
    assert {found.get(name, "eth2") for name in told} == {"eth2"}


def promised(engine: Engine, name: str, tokens: int, expires_at_ms: int) -> KvHandle:
    """What a router knows of KV that is not computed yet."""
    return KvHandle(
        worker_id=f"worker-of-{engine.capability.engine_id}",
        worker_epoch=1,
        engine_id=engine.capability.engine_id,
        engine_request_id=name,
        tokens=tokens,
        block_size=engine.capability.block_size,
        expires_at_ms=expires_at_ms,
    )


def jobs(prefill: Engine, decode: Engine, tokens: list[int], **fields: Any) -> tuple[Job, Job]:
    """Both halves of a concurrent attempt."""
    one = replace(job(tokens, PREFILL, **fields), orchestration=Orchestration.CONCURRENT)
    source = promised(prefill, one.request_id, len(tokens), one.deadline_ms)
    target = promised(decode, one.request_id, 0, one.deadline_ms)
    two = job(tokens, request_id=one.request_id, kv=source, **fields)
    return (
        replace(one, kv_target=target),
        replace(two, orchestration=Orchestration.CONCURRENT, deadline_ms=one.deadline_ms),
    )


async def at_once(
    prefill: Engine, decode: Engine, tokens: list[int], *, decode_first: bool = True, **fields: Any
) -> tuple[Answer, Answer]:
    """A concurrent attempt; either side may get its job first."""
    one, two = jobs(prefill, decode, tokens, **fields)
    sides = [(decode, two), (prefill, one)] if decode_first else [(prefill, one), (decode, two)]
    for engine, each in sides:
        engine.add(each)
    wrote, answer = await asyncio.gather(
        collected(prefill, one, add=False), collected(decode, two, add=False)
    )
    return wrote[0], answer[0]


def as_of(now_ms: int) -> Any:
    """Adapters take it to be this time, however long the machine stalls between two lines."""
    return patch.object(vllm_engine, "wall_ms", lambda: now_ms)


def is_free(engine: Any) -> bool:
    return not engine._meter.figures.kv_usage and not engine._releases.quarantined


def test_capability(engines: Engines) -> None:
    capability = engines.prefill.capability
    assert capability.orchestrations == (Orchestration.PREFILL_FIRST, Orchestration.CONCURRENT)
    assert capability.kv_layout.endswith("/push")
    assert capability.kv_layout == engines.decode.capability.kv_layout
    assert capability.kv_bytes_per_token * 32 == BLOCK_BYTES


@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 200, 700])
def test_starting_at_once_changes_nothing(
    engines: Engines, tokens: int, decode_first: bool
) -> None:
    samplings: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "seed": 7})
    for number, sampling in enumerate(samplings):
        asked = prompt(tokens, salt=1_000 + 10 * tokens + 2 * number + decode_first)
        wrote, answer = engines.run(
            at_once(engines.prefill, engines.decode, asked, decode_first=decode_first, **sampling)
        )
        alone = engines.alone(asked, **sampling)
        assert answer.token_ids == alone.token_ids
        assert answer.text == alone.text
        assert wrote.token_ids == alone.token_ids[:1]
        assert (wrote.last.finish_reason, wrote.last.kv) == ("handover", None)
        blocks = -(-tokens // 32)
        assert sum(output.kv_bytes for output in wrote.outputs) == blocks * BLOCK_BYTES
        if tokens > 1:  # of which vLLM reports nothing received
            assert answer.outputs[0].kv_bytes == blocks * BLOCK_BYTES


def test_prefill_first_works_too(engines: Engines) -> None:
    asked = prompt(150, salt=310)
    prefilled, decoded = engines.run(handed_over(engines.prefill, engines.decode, asked))
    assert decoded.token_ids == engines.alone(asked).token_ids
    assert decoded.outputs[0].kv_bytes == 5 * BLOCK_BYTES
    assert prefilled.last.kv is not None
    engines.run(until(lambda: engines.prefill.load().kv_handles_held == 0))


def test_only_what_decode_lacks_is_written(engines: Engines) -> None:
    first = prompt(300, salt=311)
    _, answer = engines.run(at_once(engines.prefill, engines.decode, first))
    second = [*first, *answer.token_ids, *prompt(30, salt=312)]
    sent = engines.prefill.load().kv_bytes_sent
    wrote, again = engines.run(at_once(engines.prefill, engines.decode, second))
    assert again.token_ids == engines.alone(second).token_ids
    assert again.outputs[0].cached_tokens == 288
    assert again.outputs[0].kv_bytes == wrote.last.kv_bytes == 2 * BLOCK_BYTES
    assert engines.prefill.load().kv_bytes_sent - sent == 2 * BLOCK_BYTES


def test_many_at_once_both_ways(engines: Engines) -> None:
    """Each engine takes both sides of some attempts, all at the same time."""
    asked = [prompt(30 + 40 * number, salt=320 + number) for number in range(8)]
    alone = [engines.alone(tokens) for tokens in asked]

    async def main() -> tuple[list[Answer], ...]:
        added: dict[str, list[Job]] = {"prefill": [], "decode": []}
        for number, tokens in enumerate(asked):
            names = ("prefill", "decode") if number % 2 else ("decode", "prefill")
            prefill, decode = (getattr(engines, name) for name in names)
            halves = jobs(prefill, decode, tokens)
            for name, half in zip(names, halves, strict=True):
                added[name].append(half)
        return tuple(
            await asyncio.gather(
                collected(engines.prefill, *added["prefill"]),
                collected(engines.decode, *added["decode"]),
            )
        )

    found = engines.run(main())
    for number, expected in enumerate(alone):
        for half in (answers[number] for answers in found):
            wanted = expected.token_ids
            handed = half.last.finish_reason == "handover"
            assert half.token_ids == (wanted[:1] if handed else wanted)


def test_a_first_token_that_ends_the_answer(engines: Engines) -> None:
    asked = prompt(60, salt=340)
    first = engines.alone(asked).token_ids[0]
    wrote, answer = engines.run(
        at_once(engines.prefill, engines.decode, asked, stop_token_ids=(first,))
    )
    assert (wrote.last.finish_reason, wrote.token_ids) == ("handover", [first])
    assert (answer.last.finish_reason, answer.token_ids) == ("stop", [first])


def test_decode_gives_up_before_the_write(engines: Engines) -> None:
    """Its blocks wait for the write, which is harmless, and are free then."""

    async def main() -> None:
        one, two = jobs(engines.prefill, engines.decode, prompt(600, salt=341))
        await until(lambda: is_free(engines.decode))
        engines.decode.add(two)
        await until(lambda: engines.decode._meter.figures.kv_usage > 0)
        engines.decode.abort(two.request_id)
        ended = await collected(engines.decode, two, add=False)
        assert ended[0].last.finish_reason == "abort"
        wrote = await answered(engines.prefill, one)
        assert wrote.last.finish_reason == "handover"
        await until(lambda: not engines.decode._meter.figures.kv_usage)

    engines.run(main())
    engines.decode._releases.cancel()
    engines.decode._releases._timers.clear()


def test_prefill_gives_up_and_so_decode_is_told(engines: Engines) -> None:
    async def main() -> None:
        one, two = jobs(engines.prefill, engines.decode, prompt(600, salt=342), timeout_ms=2_000)
        with as_of(one.deadline_ms - 2_000):
            engines.decode.add(two)
            engines.prefill.add(one)
            engines.prefill.abort(one.request_id)
            engines.decode.abort(two.request_id)
        for engine, each in ((engines.prefill, one), (engines.decode, two)):
            (answer,) = await collected(engine, each, add=False)
            assert answer.last.finish_reason == "abort"
        await until(lambda: is_free(engines.decode))

    engines.run(main())


def test_a_prefill_that_nobody_waits_for_is_freed(engines: Engines) -> None:
    async def main() -> None:
        one, _ = jobs(engines.prefill, engines.decode, prompt(200, salt=343))
        engines.prefill.add(one)
        await until(lambda: engines.prefill.load().running == 1)
        await until(lambda: one.request_id in engines.prefill._writes)
        engines.prefill.abort(one.request_id)
        (answer,) = await collected(engines.prefill, one, add=False)
        assert len(answer.token_ids) == 1
        assert answer.last.finish_reason == "abort"
        await until(lambda: not engines.prefill._meter.figures.kv_usage)

    engines.run(main())


def test_a_promise_that_is_not_kept_is_computed_in_place(engines: Engines) -> None:
    asked = prompt(90, salt=344)

    async def main() -> Answer:
        _, two = jobs(engines.prefill, engines.decode, asked)
        assert two.kv is not None
        now_ms = wall_ms()
        brief = replace(two, kv=replace(two.kv, expires_at_ms=now_ms + 400))
        with as_of(now_ms):
            answer = await answered(engines.decode, brief)
        await until(lambda: is_free(engines.decode))
        return answer

    late = engines.decode.load().extra["kv_late_total"]
    answer = engines.run(main())
    assert answer.token_ids == engines.alone(asked).token_ids
    assert not any(output.kv_bytes for output in answer.outputs)
    assert engines.decode.load().extra["kv_late_total"] == late + 1


def test_a_deadline_ends_the_wait_and_nothing_is_written_later(engines: Engines) -> None:
    asked = prompt(100, salt=345)

    async def main() -> tuple[Answer, Answer]:
        one, two = jobs(engines.prefill, engines.decode, asked, timeout_ms=300)
        waited = await answered(engines.decode, two)
        slow = replace(one, deadline_ms=wall_ms() + 60_000, kv_target=None)
        with patch.object(vllm_endings, "wall_ms", lambda: slow.deadline_ms - 1_000):
            wrote = await answered(engines.prefill, slow)  # waits for a second from its token on
        await until(lambda: is_free(engines.decode))
        return waited, wrote

    sent = engines.prefill.load().kv_bytes_sent
    waited, wrote = engines.run(main())
    assert waited.error_code == "deadline_exceeded"
    assert (len(wrote.token_ids), wrote.error_code) == (1, "kv_unavailable")
    assert engines.prefill.load().kv_bytes_sent == sent
    _, after = engines.run(at_once(engines.prefill, engines.decode, asked))
    assert after.token_ids == engines.alone(asked).token_ids


@pytest.mark.parametrize(
    "changes",
    [{"engine_id": "nobody"}, {"tokens": 7}, {"block_size": 16}, {"expires_at_ms": 1}],
)
def test_a_promise_that_cannot_be_kept_is_refused(
    engines: Engines, changes: dict[str, Any]
) -> None:
    asked = prompt(50, salt=346)
    _, two = jobs(engines.prefill, engines.decode, asked)
    assert two.kv is not None
    refused = engines.decode.load().extra["kv_refused_total"]
    answer = engines.run(answered(engines.decode, replace(two, kv=replace(two.kv, **changes))))
    assert answer.token_ids == engines.alone(asked).token_ids
    assert engines.decode.load().extra["kv_refused_total"] == refused + 1


def test_what_an_engine_cannot_do_is_an_error(engines: Engines) -> None:
    one, two = jobs(engines.prefill, engines.decode, prompt(50, salt=347))
    for engine, each in ((engines.prefill, one), (engines.decode, two)):
        other = replace(each, orchestration=Orchestration.DECODE_FIRST)
        assert engines.run(answered(engine, other)).error_code == "kv_unavailable"
    assert one.kv_target is not None
    past = replace(one, kv_target=replace(one.kv_target, expires_at_ms=1))
    assert engines.run(answered(engines.prefill, past)).error_code == "kv_unavailable"


def test_an_engine_closes_although_vllms_monitor_has_only_begun_to(engines: Engines) -> None:
    engines.decode._llm.engine_core._finalizer.detach()  # as it does first
    sockets = Path(engines.decode._launched.sockets.name)
    assert any(sockets.iterdir())
    engines.run(engines.decode.close())
    assert not sockets.exists()


def test_an_engine_that_never_had_a_request_closes_as_well() -> None:
    core_client = import_module("vllm.v1.engine.core_client")
    context = Context()
    opened = context.socket(SocketType.PULL)
    resources = core_client.BackgroundResources(context, output_socket=opened)
    resources()  # as vLLM does first
    client: Any = SimpleNamespace(engine_core=SimpleNamespace(resources=resources))
    launched: Any = SimpleNamespace(llm=client, sockets=TemporaryDirectory())
    import_module("workers.llm.vllm.launch").forget(launched)
    assert context.closed

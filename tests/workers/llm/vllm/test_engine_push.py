"""vLLM engines that push: prefill writes, and both sides may start at once.

One pair of engines for all tests. Margins are short, so that giving up is quick.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
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

from schemas.records import KvHandle, Orchestration
from streams.log.clock import wall_ms
from tests.waits import until
from tests.workers.kv.sockets import listening_sockets
from tests.workers.llm.engine_pair import EnginePair, VllmPair
from tests.workers.llm.engines import (
    PREFILL,
    Answer,
    allocated,
    answered,
    collected,
    job,
    prompt,
)
from tests.workers.processes import family
from workers.llm.engine import Engine, Job
from workers.llm.vllm import endings as vllm_endings
from workers.llm.vllm import engine as vllm_engine
from workers.llm.vllm.settings import VllmSettings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_800)]  # two engines start
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
def engines(pushing_pair: VllmPair) -> Iterator[Engines]:
    pair = pushing_pair.get()
    yield Engines(pair.runner, pair.producer, pair.consumer)
    pushing_pair.close()


def test_engines_register_no_global_metrics(engines: Engines) -> None:
    """vLLM registers metrics per process, so engines started together would clash."""
    assert not any("vllm" in name for name in prometheus_client.REGISTRY._names_to_collectors)


def test_engine_listens_only_on_loopback(engines: Engines) -> None:
    """The kernel's table lists the sockets of all engine processes and of this one."""
    pids = [os.getpid()]
    for engine in (engines.prefill, engines.decode):
        (core,) = engine._llm.engine_core.resources.engine_manager.processes
        pids += family(core.pid)
    sockets = set[Any]().union(*map(listening_sockets, pids))
    assert sockets
    assert [(table, str(host)) for table, host in sockets if not host.is_loopback] == []


def test_environment_sets_listen_addresses_unless_already_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected_env = {
        "UCX_NET_DEVICES": "eth1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    environment = import_module("workers.llm.vllm.launch").environment
    settings = VllmSettings(kv_devices="eth1")
    for name in expected_env:
        monkeypatch.delenv(name, raising=False)
    assert expected_env.items() <= environment(settings, side_channel_port=0).items()
    for name in expected_env:
        monkeypatch.setenv(name, "eth2")
    env = environment(settings, side_channel_port=0)
    assert {env.get(name, "eth2") for name in expected_env} == {"eth2"}


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
    prefill_job = replace(job(tokens, PREFILL, **fields), orchestration=Orchestration.CONCURRENT)
    source = promised(prefill, prefill_job.request_id, len(tokens), prefill_job.deadline_ms)
    target = promised(decode, prefill_job.request_id, 0, prefill_job.deadline_ms)
    decode_job = job(tokens, request_id=prefill_job.request_id, kv=source, **fields)
    return (
        replace(prefill_job, kv_target=target),
        replace(
            decode_job, orchestration=Orchestration.CONCURRENT, deadline_ms=prefill_job.deadline_ms
        ),
    )


async def at_once(
    prefill: Engine, decode: Engine, tokens: list[int], *, decode_first: bool = True, **fields: Any
) -> tuple[Answer, Answer]:
    """A concurrent attempt; either side may get its job first."""
    prefill_job, decode_job = jobs(prefill, decode, tokens, **fields)
    sides = (
        [(decode, decode_job), (prefill, prefill_job)]
        if decode_first
        else [(prefill, prefill_job), (decode, decode_job)]
    )
    for engine, side_job in sides:
        engine.add(side_job)
    wrote, answer = await asyncio.gather(
        collected(prefill, prefill_job, add=False), collected(decode, decode_job, add=False)
    )
    return wrote[0], answer[0]


def as_of(now_ms: int) -> Any:
    """Adapters take it to be this time, however long the machine stalls between two lines."""
    return patch.object(vllm_engine, "wall_ms", lambda: now_ms)


def is_free(engine: Any) -> bool:
    return not engine._meter.figures.kv_usage and not engine._releases.quarantined


def test_capability_names_push_layout(engines: Engines) -> None:
    capability = engines.prefill.capability
    assert {*capability.orchestrations} == {*Orchestration} - {Orchestration.NONE}
    assert capability.kv_layout.endswith("/push")
    assert capability.kv_layout == engines.decode.capability.kv_layout
    assert capability.kv_bytes_per_token * 32 == BLOCK_BYTES


@pytest.mark.parametrize("decode_first", [True, False])
def test_concurrent_start_writes_whole_blocks(engines: Engines, decode_first: bool) -> None:
    tokens = prompt(33, salt=1_330 + decode_first)
    wrote, answer = engines.run(
        at_once(engines.prefill, engines.decode, tokens, decode_first=decode_first)
    )
    assert sum(output.kv_bytes for output in wrote.outputs) == 2 * BLOCK_BYTES
    assert answer.outputs[0].kv_bytes == 2 * BLOCK_BYTES


def test_prefill_writes_only_missing_blocks(engines: Engines) -> None:
    first = prompt(300, salt=311)
    _, answer = engines.run(at_once(engines.prefill, engines.decode, first))
    second = [*first, *answer.token_ids, *prompt(30, salt=312)]
    sent_before = engines.prefill.load().kv_bytes_sent
    wrote, next_answer = engines.run(at_once(engines.prefill, engines.decode, second))
    assert next_answer.token_ids == engines.alone(second).token_ids
    assert next_answer.outputs[0].cached_tokens == 288
    assert next_answer.outputs[0].kv_bytes == wrote.last.kv_bytes == 2 * BLOCK_BYTES
    assert engines.prefill.load().kv_bytes_sent - sent_before == 2 * BLOCK_BYTES


def test_first_token_ends_answer_on_both_sides(engines: Engines) -> None:
    tokens = prompt(60, salt=340)
    first = engines.alone(tokens).token_ids[0]
    wrote, answer = engines.run(
        at_once(engines.prefill, engines.decode, tokens, stop_token_ids=(first,))
    )
    assert (wrote.last.finish_reason, wrote.token_ids) == ("handover", [first])
    assert (answer.last.finish_reason, answer.token_ids) == ("stop", [first])


def test_decode_abort_before_write_frees_blocks(engines: Engines) -> None:
    """The blocks stay allocated until the harmless write ends."""

    async def main() -> None:
        prefill_job, decode_job = jobs(engines.prefill, engines.decode, prompt(600, salt=341))
        await until(lambda: is_free(engines.decode))
        engines.decode.add(decode_job)
        await until(lambda: engines.decode._meter.figures.kv_usage > 0)
        engines.decode.abort(decode_job.request_id)
        decode_answers = await collected(engines.decode, decode_job, add=False)
        assert decode_answers[0].last.finish_reason == "abort"
        wrote = await answered(engines.prefill, prefill_job)
        assert wrote.last.finish_reason == "handover"
        await until(lambda: not engines.decode._meter.figures.kv_usage)

    engines.run(main())
    engines.decode._releases.cancel()
    engines.decode._releases._timers.clear()


def test_abort_of_both_phases_frees_decode_blocks(engines: Engines) -> None:
    async def main() -> None:
        prefill_job, decode_job = jobs(
            engines.prefill, engines.decode, prompt(600, salt=342), timeout_ms=2_000
        )
        with as_of(prefill_job.deadline_ms - 2_000):
            engines.decode.add(decode_job)
            engines.prefill.add(prefill_job)
            engines.prefill.abort(prefill_job.request_id)
            engines.decode.abort(decode_job.request_id)
        for engine, side_job in ((engines.prefill, prefill_job), (engines.decode, decode_job)):
            (answer,) = await collected(engine, side_job, add=False)
            assert answer.last.finish_reason == "abort"
        await until(lambda: is_free(engines.decode))

    engines.run(main())


def test_prefill_abort_frees_unwritten_blocks(engines: Engines) -> None:
    async def main() -> None:
        prefill_job, _ = jobs(engines.prefill, engines.decode, prompt(200, salt=343))
        engines.prefill.add(prefill_job)
        await until(lambda: engines.prefill.load().running == 1)
        await until(lambda: prefill_job.request_id in engines.prefill._writes)
        engines.prefill.abort(prefill_job.request_id)
        (answer,) = await collected(engines.prefill, prefill_job, add=False)
        assert len(answer.token_ids) == 1
        assert answer.last.finish_reason == "abort"
        await until(lambda: not engines.prefill._meter.figures.kv_usage)

    engines.run(main())


def test_decode_computes_prompt_of_broken_promise(engines: Engines) -> None:
    tokens = prompt(90, salt=344)

    async def main() -> Answer:
        _, decode_job = jobs(engines.prefill, engines.decode, tokens)
        assert decode_job.kv is not None
        now_ms = wall_ms()
        brief = replace(decode_job, kv=replace(decode_job.kv, expires_at_ms=now_ms + 400))
        with as_of(now_ms):
            answer = await answered(engines.decode, brief)
        await until(lambda: is_free(engines.decode))
        return answer

    late = engines.decode.load().extra["kv_late_total"]
    answer = engines.run(main())
    assert answer.token_ids == engines.alone(tokens).token_ids
    assert not any(output.kv_bytes for output in answer.outputs)
    assert engines.decode.load().extra["kv_late_total"] == late + 1


def test_deadline_ends_wait_and_prevents_later_write(engines: Engines) -> None:
    tokens = prompt(100, salt=345)

    async def main() -> tuple[Answer, Answer]:
        prefill_job, decode_job = jobs(engines.prefill, engines.decode, tokens, timeout_ms=300)
        waited = await answered(engines.decode, decode_job)
        slow = replace(prefill_job, deadline_ms=wall_ms() + 60_000, kv_target=None)
        with patch.object(vllm_endings, "wall_ms", lambda: slow.deadline_ms - 1_000):
            wrote = await answered(engines.prefill, slow)  # waits for a second from its token on
        await until(lambda: is_free(engines.decode))
        return waited, wrote

    sent_before = engines.prefill.load().kv_bytes_sent
    waited, wrote = engines.run(main())
    assert waited.error_code == "deadline_exceeded"
    assert (len(wrote.token_ids), wrote.error_code) == (1, "kv_unavailable")
    assert engines.prefill.load().kv_bytes_sent == sent_before
    _, after = engines.run(at_once(engines.prefill, engines.decode, tokens))
    assert after.token_ids == engines.alone(tokens).token_ids


@pytest.mark.parametrize(
    "changes",
    [{"engine_id": "nobody"}, {"tokens": 7}, {"block_size": 16}, {"expires_at_ms": 1}],
)
def test_decode_computes_prompt_of_unusable_promise(
    engines: Engines, changes: dict[str, Any]
) -> None:
    tokens = prompt(50, salt=346)
    _, decode_job = jobs(engines.prefill, engines.decode, tokens)
    assert decode_job.kv is not None
    refused = engines.decode.load().extra["kv_refused_total"]
    answer = engines.run(
        answered(engines.decode, replace(decode_job, kv=replace(decode_job.kv, **changes)))
    )
    assert answer.token_ids == engines.alone(tokens).token_ids
    assert engines.decode.load().extra["kv_refused_total"] == refused + 1


def test_prefill_rejects_invalid_target(engines: Engines) -> None:
    """A target of `decode_first` must name valid blocks."""
    prefill_job, _ = jobs(engines.prefill, engines.decode, prompt(50, salt=347))
    assert prefill_job.kv_target is not None
    late_job = replace(prefill_job, kv_target=replace(prefill_job.kv_target, expires_at_ms=1))
    assert engines.run(answered(engines.prefill, late_job)).error_code == "kv_unavailable"
    for changes in (
        {"block_ids": ()},
        {"block_ids": (1,)},
        {"block_ids": (1, 2), "tokens": 50},
        {"block_ids": (1, 2), "tokens": 16},
        {"block_ids": (1, 2), "block_size": 16},
    ):
        target = replace(prefill_job.kv_target, **changes)
        bad = replace(prefill_job, kv_target=target, orchestration=Orchestration.DECODE_FIRST)
        assert engines.run(answered(engines.prefill, bad)).error_code == "kv_unavailable"


def in_order(
    engines: Engines, tokens: list[int], changed: Callable[[KvHandle], KvHandle] = lambda kv: kv
) -> tuple[Answer, Answer]:
    """An attempt of `decode_first`; what decode has allocated may be changed on its way."""
    prefill_job, decode_job = jobs(engines.prefill, engines.decode, tokens)
    prefill_job, decode_job = (
        replace(job, orchestration=Orchestration.DECODE_FIRST) for job in (prefill_job, decode_job)
    )

    async def main() -> tuple[Answer, Answer]:
        target = (await allocated(engines.decode, decode_job)).kv
        assert target is not None
        prefill = replace(prefill_job, kv_target=changed(target))
        wrote, (answer,) = await asyncio.gather(
            answered(engines.prefill, prefill), collected(engines.decode, decode_job, add=False)
        )
        return wrote, answer

    answers: tuple[Answer, Answer] = engines.run(main())
    return answers


def second_turn(engines: Engines, salt: int) -> list[int]:
    """A prompt of which the decode engine alone has nine blocks."""
    first = prompt(300, salt=salt)
    answer = engines.run(answered(engines.decode, job(first)))
    return [*first, *answer.token_ids, *prompt(60, salt=salt + 1)]


def test_prefill_reads_blocks_of_decode_and_writes_rest(engines: Engines) -> None:
    second = second_turn(engines, 350)
    received = engines.prefill.load().kv_bytes_received
    wrote, answer = in_order(engines, second)
    first, last = wrote.outputs[0], wrote.last
    assert (first.cached_tokens, first.kv_bytes) == (288, 9 * BLOCK_BYTES)
    assert last.kv_bytes == 3 * BLOCK_BYTES
    assert engines.prefill.load().kv_bytes_received - received == 9 * BLOCK_BYTES
    assert answer.outputs[0].cached_tokens == 288
    assert answer.token_ids == engines.alone(second).token_ids
    assert answer.token_ids == engines.run(answered(engines.decode, job(second))).token_ids


@pytest.mark.parametrize(("case", "salt"), [("other tokens", 352), ("out of range", 354)])
def test_prefill_computes_prompt_if_target_blocks_are_invalid(
    engines: Engines, case: str, salt: int
) -> None:
    """Nobody reads blocks with another prompt's mark or out of range."""
    second = second_turn(engines, salt)

    def changed(kv: KvHandle) -> KvHandle:
        if case == "other tokens":
            return replace(kv, params=kv.params.replace(b'"prefix_mark": "', b'"prefix_mark": "0'))
        return replace(kv, block_ids=tuple(10**6 + block for block in kv.block_ids))

    wrote, answer = in_order(engines, second, changed)
    assert (wrote.outputs[0].cached_tokens, wrote.outputs[0].kv_bytes) == (0, 0)
    assert wrote.last.finish_reason == "handover"
    assert answer.token_ids == engines.alone(second).token_ids
    assert answer.token_ids == engines.run(answered(engines.decode, job(second))).token_ids


@pytest.mark.parametrize("fails", [3, 4])
def test_prefill_retries_failed_write(engines: Engines, fails: int) -> None:
    tokens = prompt(70, salt=360 + fails)
    retried = engines.prefill.load().extra["kv_retries_total"]

    async def main() -> tuple[Answer, Answer]:
        prefill_job, decode_job = jobs(engines.prefill, engines.decode, tokens)
        now_ms = wall_ms()
        assert decode_job.kv is not None
        if fails == 4:
            decode_job = replace(
                decode_job, kv=replace(decode_job.kv, expires_at_ms=now_ms + 3_000)
            )
            prefill_job = replace(prefill_job, deadline_ms=now_ms + 3_000)
        await engines.prefill._llm.collective_rpc("fail_moves", args=(fails,))
        with as_of(now_ms):
            engines.decode.add(decode_job)
            engines.prefill.add(prefill_job)
        (wrote,), (answer,) = await asyncio.gather(
            collected(engines.prefill, prefill_job, add=False),
            collected(engines.decode, decode_job, add=False),
        )
        await until(lambda: is_free(engines.decode))
        return wrote, answer

    wrote, answer = engines.run(main())
    assert answer.token_ids == engines.alone(tokens).token_ids
    assert engines.prefill.load().extra["kv_retries_total"] == retried + 3
    assert wrote.last.finish_reason == ("handover" if fails == 3 else "error")
    assert (answer.outputs[0].kv_missed is None) == (fails == 3)


@pytest.mark.parametrize("fails", [3, 4])
def test_prefill_retries_failed_read(engines: Engines, fails: int) -> None:
    second = second_turn(engines, 370 + 2 * fails)
    engines.run(engines.prefill._llm.collective_rpc("fail_moves", args=(fails,)))
    wrote, answer = in_order(engines, second)
    assert wrote.outputs[0].cached_tokens == (288 if fails == 3 else 0)
    assert wrote.last.finish_reason == "handover"
    assert answer.token_ids == engines.alone(second).token_ids


def test_decode_reports_why_it_computed_prompt(engines: Engines) -> None:
    tokens = prompt(90, salt=348)
    _, decode_job = jobs(engines.prefill, engines.decode, tokens)
    assert decode_job.kv is not None
    now_ms = wall_ms()
    brief = replace(decode_job, kv=replace(decode_job.kv, expires_at_ms=now_ms + 200))
    with as_of(now_ms):
        answer = engines.run(answered(engines.decode, brief))
    errors = [output.kv_missed for output in answer.outputs]
    assert errors[0] is not None and errors[0].code == "kv_unavailable"
    assert not any(errors[1:])
    engines.run(until(lambda: is_free(engines.decode)))


def test_engine_closes_after_vllm_monitor_detached(engines: Engines) -> None:
    engines.decode._llm.engine_core._finalizer.detach()  # as it does first
    sockets = Path(engines.decode._launched.sockets.name)
    assert any(sockets.iterdir())
    engines.run(engines.decode.close())
    assert not sockets.exists()


def test_engine_closes_without_any_request() -> None:
    core_client = import_module("vllm.v1.engine.core_client")
    context = Context()
    opened = context.socket(SocketType.PULL)
    resources = core_client.BackgroundResources(context, output_socket=opened)
    resources()  # as vLLM does first
    client: Any = SimpleNamespace(engine_core=SimpleNamespace(resources=resources))
    launched: Any = SimpleNamespace(llm=client, sockets=TemporaryDirectory())
    import_module("workers.llm.vllm.launch").forget(launched)
    assert context.closed

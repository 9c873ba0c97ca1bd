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

from schemas.log.clock import wall_ms
from schemas.records import KvHandle, Orchestration
from tests.waiting import until
from tests.workers.kv.sockets import listening
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


def test_engines_share_no_metrics(engines: Engines) -> None:
    """vLLM's own are registered for a whole process, so engines that start at once would clash."""
    assert not any("vllm" in name for name in prometheus_client.REGISTRY._names_to_collectors)


def test_nobody_beyond_this_machine_reaches_an_engine(engines: Engines) -> None:
    """By the kernel's table of sockets: an engine's processes and who drives it."""
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
    assert {*capability.orchestrations} == {*Orchestration} - {Orchestration.NONE}
    assert capability.kv_layout.endswith("/push")
    assert capability.kv_layout == engines.decode.capability.kv_layout
    assert capability.kv_bytes_per_token * 32 == BLOCK_BYTES


@pytest.mark.parametrize("decode_first", [True, False])
def test_starting_at_once_writes_whole_blocks(engines: Engines, decode_first: bool) -> None:
    asked = prompt(33, salt=1_330 + decode_first)
    wrote, answer = engines.run(
        at_once(engines.prefill, engines.decode, asked, decode_first=decode_first)
    )
    assert sum(output.kv_bytes for output in wrote.outputs) == 2 * BLOCK_BYTES
    assert answer.outputs[0].kv_bytes == 2 * BLOCK_BYTES


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


def test_a_target_that_is_none_is_an_error(engines: Engines) -> None:
    """Of `decode_first`, where the prompt would be written to."""
    one, _ = jobs(engines.prefill, engines.decode, prompt(50, salt=347))
    assert one.kv_target is not None
    past = replace(one, kv_target=replace(one.kv_target, expires_at_ms=1))
    assert engines.run(answered(engines.prefill, past)).error_code == "kv_unavailable"
    for changes in (
        {"block_ids": ()},
        {"block_ids": (1,)},
        {"block_ids": (1, 2), "tokens": 50},
        {"block_ids": (1, 2), "tokens": 16},
        {"block_ids": (1, 2), "block_size": 16},
    ):
        target = replace(one.kv_target, **changes)
        bad = replace(one, kv_target=target, orchestration=Orchestration.DECODE_FIRST)
        assert engines.run(answered(engines.prefill, bad)).error_code == "kv_unavailable"


def in_order(
    engines: Engines, tokens: list[int], changed: Callable[[KvHandle], KvHandle] = lambda kv: kv
) -> tuple[Answer, Answer]:
    """An attempt of `decode_first`; what decode has allocated may be changed on its way."""
    one, two = jobs(engines.prefill, engines.decode, tokens)
    one, two = (replace(each, orchestration=Orchestration.DECODE_FIRST) for each in (one, two))

    async def main() -> tuple[Answer, Answer]:
        target = (await allocated(engines.decode, two)).kv
        assert target is not None
        prefill = replace(one, kv_target=changed(target))
        wrote, (answer,) = await asyncio.gather(
            answered(engines.prefill, prefill), collected(engines.decode, two, add=False)
        )
        return wrote, answer

    found: tuple[Answer, Answer] = engines.run(main())
    return found


def second_turn(engines: Engines, salt: int) -> list[int]:
    """A prompt of which the decode engine alone has nine blocks."""
    first = prompt(300, salt=salt)
    answer = engines.run(answered(engines.decode, job(first)))
    return [*first, *answer.token_ids, *prompt(60, salt=salt + 1)]


def test_prefill_reads_what_decode_has_and_writes_the_rest(engines: Engines) -> None:
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
def test_what_decode_cannot_have_is_computed(engines: Engines, case: str, salt: int) -> None:
    """A mark that is not the prompt's, or blocks that are none: each is read by nobody."""
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
def test_a_write_that_fails_is_tried_again(engines: Engines, fails: int) -> None:
    asked = prompt(70, salt=360 + fails)
    retried = engines.prefill.load().extra["kv_retries_total"]

    async def main() -> tuple[Answer, Answer]:
        one, two = jobs(engines.prefill, engines.decode, asked)
        now_ms = wall_ms()
        assert two.kv is not None
        if fails == 4:
            two = replace(two, kv=replace(two.kv, expires_at_ms=now_ms + 3_000))
            one = replace(one, deadline_ms=now_ms + 3_000)
        await engines.prefill._llm.collective_rpc("fail_moves", args=(fails,))
        with as_of(now_ms):
            engines.decode.add(two)
            engines.prefill.add(one)
        (wrote,), (answer,) = await asyncio.gather(
            collected(engines.prefill, one, add=False), collected(engines.decode, two, add=False)
        )
        await until(lambda: is_free(engines.decode))
        return wrote, answer

    wrote, answer = engines.run(main())
    assert answer.token_ids == engines.alone(asked).token_ids
    assert engines.prefill.load().extra["kv_retries_total"] == retried + 3
    assert wrote.last.finish_reason == ("handover" if fails == 3 else "error")
    assert (answer.outputs[0].kv_missed is None) == (fails == 3)


@pytest.mark.parametrize("fails", [3, 4])
def test_prefills_read_that_fails_is_tried_again(engines: Engines, fails: int) -> None:
    second = second_turn(engines, 370 + 2 * fails)
    engines.run(engines.prefill._llm.collective_rpc("fail_moves", args=(fails,)))
    wrote, answer = in_order(engines, second)
    assert wrote.outputs[0].cached_tokens == (288 if fails == 3 else 0)
    assert wrote.last.finish_reason == "handover"
    assert answer.token_ids == engines.alone(second).token_ids


def test_decode_tells_why_it_computed_the_prompt(engines: Engines) -> None:
    asked = prompt(90, salt=348)
    _, two = jobs(engines.prefill, engines.decode, asked)
    assert two.kv is not None
    now_ms = wall_ms()
    brief = replace(two, kv=replace(two.kv, expires_at_ms=now_ms + 200))
    with as_of(now_ms):
        answer = engines.run(answered(engines.decode, brief))
    told = [output.kv_missed for output in answer.outputs]
    assert told[0] is not None and told[0].code == "kv_unavailable"
    assert not any(told[1:])
    engines.run(until(lambda: is_free(engines.decode)))


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

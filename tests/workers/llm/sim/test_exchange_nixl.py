"""Simulated engines in different processes hand KV over by NIXL; one of them dies."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from schemas.records import KvHandle, Orchestration
from streams.log.clock import wall_ms
from tests.waits import run, until
from tests.workers.llm.engines import (
    PATIENT,
    PREFILL,
    allocated,
    answered,
    collected,
    job,
    peer_handle,
    prompt,
    start_sim,
)
from tests.workers.llm.sim.block_checks import drop_prefix_cache
from workers.llm.engine import Job, Output

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="needs the package nixl")

PRODUCER = """
import asyncio, pickle, sys
from tests.workers.llm.engines import PREFILL, answered, job, prompt, start_sim

async def main():
    engine = await start_sim(transfer="nixl", worker_id=sys.argv[1])
    loop = asyncio.get_running_loop()
    print(engine.capability.nixl_metadata.hex(), engine.capability.engine_id, flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.startswith("job"):
            one = pickle.loads(bytes.fromhex(line.split()[1]))
            print(pickle.dumps((await answered(engine, one)).outputs).hex(), flush=True)
            continue
        if line.startswith("load"):
            print(engine.load().kv_bytes_sent, engine.blocks.used, flush=True)
            continue
        tokens, salt, request_id = line.split()
        one = job(prompt(int(tokens), int(salt)), PREFILL, request_id=request_id)
        print(pickle.dumps((await answered(engine, one)).last.kv).hex(), flush=True)
    await engine.close()

asyncio.run(main())
"""


class Producer:
    """A prefill engine in a process of its own."""

    def __init__(self, worker_id: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRODUCER, worker_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        card, self.engine_id = self._line().split()
        self.worker_id, self.card = worker_id, bytes.fromhex(card)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    async def ask(self, line: str) -> str:
        """Its answer; engines of this process go on meanwhile."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return await asyncio.to_thread(self._line)

    async def answered(self, job: Job) -> list[Output]:
        """All outputs of a job there."""
        reply = await self.ask(f"job {pickle.dumps(job).hex()}")
        outputs: list[Output] = pickle.loads(bytes.fromhex(reply))
        return outputs

    def promise(self, request_id: str, tokens: int) -> KvHandle:
        """What the router says of this worker to decode."""
        return KvHandle(
            worker_id=self.worker_id,
            worker_epoch=1,
            engine_id=self.engine_id,
            engine_request_id=request_id,
            tokens=tokens,
            block_size=16,
            expires_at_ms=wall_ms() + 60_000,
            params=self.card,
        )

    async def prefill(self, tokens: int, salt: int, request_id: str) -> KvHandle:
        reply = await self.ask(f"{tokens} {salt} {request_id}")
        kv: Any = pickle.loads(bytes.fromhex(reply))
        assert isinstance(kv, KvHandle)
        return kv

    async def load(self) -> tuple[int, int]:
        """KV bytes sent and blocks in use."""
        bytes_sent, blocks_used = (await self.ask("load")).split()
        return int(bytes_sent), int(blocks_used)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def producers() -> Iterator[Callable[[str], Producer]]:
    started: list[Producer] = []

    def start(worker_id: str) -> Producer:
        started.append(Producer(worker_id))
        return started[-1]

    yield start
    for producer in started:
        producer.end()


def test_hand_over_between_processes_keeps_answer(
    producers: Callable[[str], Producer],
) -> None:
    producer = producers("producer")

    async def main() -> None:
        consumer = await start_sim(transfer="nixl")
        for salt, tokens in enumerate([5, 64, 333]):
            kv = await producer.prefill(tokens, salt, f"remote-{salt}")
            answer = await answered(
                consumer, job(prompt(tokens, salt), request_id=f"remote-{salt}", kv=kv)
            )
            assert answer.outputs[0].kv_bytes == -(-tokens // 16) * 4_096
            assert answer.outputs[0].transfer_ms > 0
            drop_prefix_cache(consumer.blocks)
            alone = await answered(consumer, job(prompt(tokens, salt)))
            assert answer.token_ids == alone.token_ids
        received = consumer.load().kv_bytes_received
        assert received == (1 + 4 + 21) * 4_096
        bytes_sent, blocks_used = await producer.load()
        while blocks_used:  # the last notice is on its way
            bytes_sent, blocks_used = await producer.load()
        assert bytes_sent == received
        await consumer.close()

    run(main())


def test_decode_recomputes_kv_of_dead_producer_and_reads_new_one(
    producers: Callable[[str], Producer],
) -> None:
    first = producers("producer")

    async def main() -> None:
        consumer = await start_sim(transfer="nixl")
        known_kv, lost_kv = await first.prefill(40, 1, "known"), await first.prefill(50, 2, "lost")
        assert (await answered(consumer, job(prompt(40, 1), kv=known_kv))).outputs[0].kv_bytes
        first.end()
        answer = await answered(consumer, job(prompt(50, 2), kv=lost_kv))
        assert answer.outputs[0].kv_bytes == 0
        drop_prefix_cache(consumer.blocks)
        assert answer.token_ids == (await answered(consumer, job(prompt(50, 2)))).token_ids
        assert consumer.load().extra["recomputed_total"] == 1
        kv = await producers("producer-2").prefill(60, 3, "next")
        assert (await answered(consumer, job(prompt(60, 3), kv=kv))).outputs[0].kv_bytes
        await consumer.close()

    run(main())


@pytest.mark.parametrize("orchestration", [Orchestration.CONCURRENT, Orchestration.DECODE_FIRST])
def test_prefill_writes_kv_into_other_process(
    producers: Callable[[str], Producer], orchestration: Orchestration
) -> None:
    producer = producers("producer")

    async def main() -> None:
        consumer = await start_sim(transfer="nixl", tensor_parallel=2)
        await answered(consumer, job(prompt(64)))  # 4 blocks of the prompt are there
        tokens = prompt(333)
        fields: dict[str, Any] = {"request_id": "pair.1", "orchestration": orchestration}
        second = job(tokens, kv=producer.promise("pair.1", len(tokens)), **fields)
        target: KvHandle | None = peer_handle(consumer, "pair.1")
        if orchestration is Orchestration.DECODE_FIRST:
            target = (await allocated(consumer, second)).kv
        else:
            consumer.add(second)
        first = job(tokens, PREFILL, kv_target=target, **fields)
        (decoded,), outputs = await asyncio.gather(
            collected(consumer, second, add=False), producer.answered(first)
        )
        assert outputs[-1].finish_reason == "handover"
        assert outputs[-1].kv_bytes == consumer.load().kv_bytes_received == (21 - 4) * 4_096
        assert list(outputs[0].token_ids) == decoded.token_ids[:1]
        assert outputs[0].cached_tokens == (64 if target and target.tokens else 0)
        drop_prefix_cache(consumer.blocks)
        assert decoded.token_ids == (await answered(consumer, job(tokens))).token_ids
        await consumer.close()

    run(main())


def test_dead_producer_does_not_stall_consumer(
    producers: Callable[[str], Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = producers("producer")

    async def main() -> None:
        consumer = await start_sim(transfer="nixl")
        fields: dict[str, Any] = {
            "request_id": "pair.1",
            "orchestration": Orchestration.CONCURRENT,
        }
        second = job(prompt(50), kv=producer.promise("pair.1", 50), **fields)
        beside = job(prompt(30, 3), max_tokens=300)
        for decode_job in (second, beside):
            consumer.add(decode_job)
        assert consumer.load().extra["awaiting"] == 1
        producer.end()
        consumer.abort("pair.1")
        decoded, neighbour = await collected(consumer, second, beside, add=False)
        assert decoded.last.finish_reason == "abort"
        assert len(neighbour.token_ids) == 300
        assert consumer.blocks.used == 4  # its promise stands
        with monkeypatch.context() as later:
            now_ms = wall_ms() + sum(PATIENT.values())
            later.setattr("workers.llm.sim.schedule.wall_ms", lambda: now_ms)
            await until(lambda: not consumer.blocks.used)
        kv = await producers("producer-2").prefill(60, 4, "next")
        assert (await answered(consumer, job(prompt(60, 4), kv=kv))).outputs[0].kv_bytes
        await consumer.close()

    run(main())

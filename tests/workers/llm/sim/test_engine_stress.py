"""Seeded disorder: hand-overs of all kinds, failing and stalled moves, aborts; nothing leaks or
lies."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from schemas.records import KvHandle, Orchestration
from tests.virtual_time import run_virtual
from tests.waits import pass_time, until
from tests.workers.llm.engines import (
    PREFILL,
    collected,
    job,
    paired_jobs,
    prompt,
    start_sim,
    transfer_of,
)
from tests.workers.llm.sim.block_checks import check_blocks, drop_prefix_cache
from workers.llm.engine import Job, Output
from workers.llm.sim.engine import SimEngine

ROUNDS = 200
CHOICES = ["prefill", "prefill", "decode", "fetch", "fetch", "fetch", "abort", "fault"]
PAIRS = [*CHOICES, "concurrent", "decode_first", "concurrent", "decode_first", "abort"]


class Client:
    """Takes all outputs of one engine and keeps them by request."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self.prefills: dict[str, tuple[Client, Job]] = {}  # to add when decode has allocated
        self._task = asyncio.ensure_future(self._collect())

    def add(self, job: Job) -> None:
        assert job.request_id not in self.tokens
        self.tokens[job.request_id] = []
        self.engine.add(job)

    async def _collect(self) -> None:
        while True:
            for output in await self.engine.outputs():
                assert output.request_id not in self.ends, "an output after the last one"
                self.tokens[output.request_id] += output.token_ids
                if output.kv is not None and output.request_id in self.prefills:
                    producer, prefill = self.prefills.pop(output.request_id)
                    producer.add(replace(prefill, kv_target=output.kv))
                if output.finish_reason:
                    self.ends[output.request_id] = output

    @property
    def is_done(self) -> bool:
        """Every request has its last output, or a check of the task failed."""
        return self._task.done() or len(self.ends) == len(self.tokens)

    async def stopped(self) -> None:
        """End the task; raises what it found."""
        self._task.cancel()
        result = (await asyncio.gather(self._task, return_exceptions=True))[0]
        assert isinstance(result, asyncio.CancelledError), result


def add_pair(
    producer: Client, consumer: Client, tokens: list[int], kind: str, request_id: str, first: bool
) -> None:
    """Both phases at once; with `first` prefill has its job before decode."""
    orchestration = Orchestration(kind)
    fields = {"request_id": request_id, "max_tokens": 30}
    jobs = paired_jobs(producer.engine, consumer.engine, tokens, orchestration, **fields)
    if orchestration is Orchestration.DECODE_FIRST:
        consumer.prefills[request_id] = producer, jobs[0]
        consumer.add(jobs[1])
        return
    sides = [(producer, jobs[0]), (consumer, jobs[1])]
    for client, side_job in sides if first else reversed(sides):
        client.add(side_job)


async def disorder(seed: int, choices: list[str], degrees: tuple[int, int]) -> Counter[str]:
    """Random work on two engines; returns how requests ended and what the engines counted."""
    chance = random.Random(seed)
    small = {"kv_blocks": 40, "running_max": 4, "prefill_running_max": 2}
    brief = {
        "transfer_timeout_ms": 15,
        "handle_ttl_ms": 400,
        "handle_margin_ms": 200,  # a stalled write is made before this has passed
        "transfer_tries_max": 2,
    }
    engines = [await start_sim(**small, **brief, tensor_parallel=degree) for degree in degrees]
    transfers = [transfer_of(engine) for engine in engines]
    clients = [Client(engine) for engine in engines]
    prompts = [prompt(chance.randrange(1, 90), salt) for salt in range(8)]
    handles: list[tuple[Client, KvHandle, list[int]]] = []
    prompt_of: dict[str, list[int]] = {}
    handled_ids: set[str] = set()
    aborted: set[str] = set()
    for number in range(ROUNDS):
        client, tokens = chance.choice(clients), chance.choice(prompts)
        match chance.choice(choices):
            case "prefill":
                client.add(job(tokens, PREFILL, request_id=f"prefill-{number}"))
                prompt_of[f"prefill-{number}"] = tokens
            case "decode":
                prompt_of[f"decode-{number}"] = tokens
                client.add(job(tokens, request_id=f"decode-{number}", max_tokens=30))
            case "fetch" if handles:
                at = chance.randrange(len(handles))
                reader, kv, kv_prompt = handles[at] if chance.random() < 0.1 else handles.pop(at)
                prompt_of[f"fetch-{number}"] = kv_prompt
                if chance.random() < 0.7:
                    drop_prefix_cache(reader.engine.blocks)
                reader.add(job(kv_prompt, request_id=f"fetch-{number}", kv=kv, max_tokens=30))
            case ("concurrent" | "decode_first") as kind:
                peer = clients[1 - clients.index(client)]
                prompt_of[f"pair-{number}"] = tokens
                if chance.random() < 0.3:
                    drop_prefix_cache(client.engine.blocks)
                add_pair(client, peer, tokens, kind, f"pair-{number}", chance.random() < 0.5)
            case "abort" if open_ids := [key for key in client.tokens if key not in client.ends]:
                request_id = chance.choice(open_ids)
                aborted.add(request_id)
                client.engine.abort(request_id)
            case "fault":
                transfer = chance.choice(transfers)
                transfer.stalled = chance.random() < 0.4
                transfer.failing = chance.randrange(4)
        await pass_time(chance.choice([0, 0.001, 0.003]))
        for owner, owner_client in enumerate(clients):
            for request_id in sorted(owner_client.ends.keys() - handled_ids):
                handled_ids.add(request_id)
                handle = owner_client.ends[request_id].kv
                if handle is not None and request_id not in aborted:  # else its KV may be gone
                    # one reader each, as the router sees to: with two, one may read freed blocks
                    reader = clients[1 - owner] if chance.random() < 0.9 else clients[owner]
                    handles.append((reader, handle, prompt_of[request_id]))
    for transfer in transfers:
        transfer.stalled, transfer.failing = False, 0
    return await settled(clients, prompt_of)


async def settled(clients: list[Client], prompt_of: dict[str, list[int]]) -> Counter[str]:
    """Wait until all has ended, and check what is left; the counts of `disorder`."""
    engines = [client.engine for client in clients]
    await until(lambda: all(client.is_done for client in clients))
    for client in clients:
        await client.stopped()
    await until(lambda: not any(engine.blocks.used for engine in engines))
    await check(clients, prompt_of)
    for engine in engines:
        check_blocks(engine.blocks)
        assert engine.load().running == engine.load().waiting == 0
        await engine.close()
    counts = Counter(output.finish_reason for client in clients for output in client.ends.values())
    for engine in engines:
        counts.update({key: int(value) for key, value in engine.load().extra.items()})
        counts["fetched"] += engine.load().kv_bytes_received
    return counts


async def check(clients: list[Client], prompt_of: dict[str, list[int]]) -> None:
    """Every whole answer is what an untouched engine says; every other one is its beginning."""
    calm = await start_sim(kv_blocks=2_048)
    keys = {tuple(tokens) for tokens in prompt_of.values()}
    jobs = [job(list(key), max_tokens=30) for key in keys]
    answers = await collected(calm, *jobs)
    truth = {key: answer.token_ids for key, answer in zip(keys, answers, strict=True)}
    for client in clients:
        for request_id, tokens in client.tokens.items():
            expected = truth[tuple(prompt_of[request_id])]
            assert tokens == expected[: len(tokens)]
            if client.ends[request_id].finish_reason == "length":
                assert tokens == expected
    await calm.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_hand_overs_leak_no_blocks_and_keep_answers(seed: int) -> None:
    ends = run_virtual(disorder(seed, CHOICES, (1, 1)))
    assert ends["length"] > 10
    assert ends["handover"] > 5
    assert min(ends[key] for key in ("abort", "error", "fetched")) > 0
    assert min(ends[key] for key in ("fetch_failures_total", "recomputed_total")) > 0


@pytest.mark.parametrize(("seed", "degrees"), [(4, (1, 1)), (5, (1, 4)), (6, (4, 2))])
def test_random_pairs_leak_no_blocks_and_keep_answers(seed: int, degrees: tuple[int, int]) -> None:
    ends = run_virtual(disorder(seed, PAIRS, degrees))
    assert ends["length"] > 10
    assert ends["handover"] > 10
    assert min(ends[key] for key in ("abort", "error", "fetched")) > 0

"""Engines for tests: the table of implementations, jobs with defaults, collected answers."""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schemas.records import (
    KvHandle,
    Orchestration,
    Role,
    Sampling,
    WorkPhase,
)
from schemas.settings import ModelSettings
from streams.log.clock import wall_ms
from tests.workers.kv.faulty_transfer import FaultyTransfer
from workers.llm.engine import Engine, Job, Output
from workers.llm.sim import engine as sim_engine
from workers.llm.sim.engine import SimEngine, start
from workers.llm.sim.settings import SimSettings
from workers.llm.vllm import start as vllm_start
from workers.llm.vllm.settings import VllmSettings
from workers.models.tiny import END_ID

DECODE, PREFILL = WorkPhase.DECODE, WorkPhase.PREFILL
FAST = SimSettings(
    prefill_base_ms=1, decode_step_ms=1, kv_blocks=256, end_every_tokens=0, transfer="memory"
)
# Of moves over NIXL, which take real time: the machine may stall.
PATIENT = {"handle_ttl_ms": 120_000, "transfer_timeout_ms": 60_000}
_numbers = itertools.count(1)
vars(sim_engine)["MemoryTransfer"] = FaultyTransfer  # for the faults that a test asks for


async def start_sim(**changes: Any) -> SimEngine:
    """A quick simulated engine; any field of SimSettings, and worker_id, epoch or the model's."""
    if changes.get("transfer") == "nixl":
        changes = {**PATIENT, **changes}
    number = next(_numbers)
    worker_id = changes.pop("worker_id", f"worker-{number}")
    epoch = changes.pop("worker_epoch", 1)
    model = ModelSettings(path="sim", **_model_fields(changes))
    peer_metadata = changes.pop("peer_metadata", None)
    engine = await start(
        replace(FAST, **changes),
        model=model,
        engine_id=f"engine-{os.getpid()}-{number}",
        worker_id=worker_id,
        worker_epoch=epoch,
    )
    if peer_metadata is not None:
        engine.set_peer_metadata(peer_metadata)
    return engine


def _model_fields(changes: dict[str, Any]) -> dict[str, Any]:
    """Those of the changes that are fields of ModelSettings; they are removed there."""
    names = ("max_model_len", "adapters", "adapters_max", "name")
    return {name: changes.pop(name) for name in names if name in changes}


def transfer_of(engine: Engine) -> FaultyTransfer:
    """The transfer of an engine whose KV moves in memory."""
    transfer = FaultyTransfer.peers[engine.capability.engine_id]
    assert isinstance(transfer, FaultyTransfer)
    return transfer


async def _sim_nixl() -> Engine:
    return await start_sim(transfer="nixl")


async def _sim_memory() -> Engine:
    return await start_sim()


async def start_vllm(**changes: Any) -> Engine:
    """A vLLM engine of the tiny model; any field of VllmSettings, roles and the model's."""
    number = next(_numbers)
    roles = changes.pop("roles", (Role.PREFILL, Role.DECODE))
    model = ModelSettings(path="tiny", **_model_fields(changes))
    cores = sorted(os.sched_getaffinity(0))
    small: dict[str, Any] = {
        "kv_cache_bytes": 64 << 20,
        "cpu_bind": str(cores[number % len(cores)]),
        "progress_timeout_ms": 60_000,  # the machine may stall
    }
    return await vllm_start.start(
        VllmSettings(**small | changes),
        model=model,
        role_set=roles,
        engine_id=f"engine-{os.getpid()}-{number}",
        worker_id=f"worker-{number}",
        worker_epoch=1,
    )


ENGINES: dict[str, Callable[[], Awaitable[Engine]]] = {
    "sim": _sim_memory,
    "sim-nixl": _sim_nixl,
    "vllm": start_vllm,
}


def end_id(engine: Engine) -> int:
    """The token with which its model ends answers."""
    return engine._vocabulary.end_ids[0] if isinstance(engine, SimEngine) else END_ID


def prompt(tokens: int, salt: int = 0) -> list[int]:
    """A prompt of so many tokens; another salt gives another one."""
    return [10 + (salt * 131 + i * 7) % 400 for i in range(tokens)]


def job(
    prompt_tokens: Sequence[int],
    phase: WorkPhase = DECODE,
    *,
    request_id: str = "",
    kv: KvHandle | None = None,
    kv_target: KvHandle | None = None,
    orchestration: Orchestration = Orchestration.NONE,
    timeout_ms: int = 60_000,
    prior_tokens: int = 0,
    prior_chars: int = 0,
    cache_scope: str = "",
    adapter: str = "",
    **sampling: Any,
) -> Job:
    """A greedy job of 12 tokens; any field of Sampling can be given."""
    return Job(
        request_id=request_id or f"request-{next(_numbers)}",
        phase=phase,
        prompt_tokens=prompt_tokens,
        sampling=Sampling(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling}),
        deadline_ms=wall_ms() + timeout_ms,
        kv=kv,
        kv_target=kv_target,
        orchestration=orchestration,
        prior_tokens=prior_tokens,
        prior_chars=prior_chars,
        cache_scope=cache_scope,
        adapter=adapter,
    )


@dataclass
class Answer:
    """All outputs of one request."""

    outputs: list[Output] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def last(self) -> Output:
        return self.outputs[-1]

    @property
    def error_code(self) -> str:
        return self.last.error.code if self.last.error else ""


async def collected(engine: Engine, *jobs: Job, add: bool = True) -> list[Answer]:
    """Add the jobs and take outputs until all have ended."""
    answers = {job.request_id: Answer() for job in jobs}
    open_ids = set(answers)
    if add:
        for job in jobs:
            engine.add(job)
    while open_ids:
        outputs = await engine.outputs()
        assert outputs
        ids = [output.request_id for output in outputs]
        assert len(ids) == len(set(ids)), "one output per request and step"
        for output in outputs:
            if output.request_id not in answers:
                continue
            assert output.request_id in open_ids, "an output after the last one"
            answers[output.request_id].outputs.append(output)
            if output.finish_reason:
                open_ids.discard(output.request_id)
    return list(answers.values())


async def answered(engine: Engine, job: Job) -> Answer:
    """The whole answer to one job."""
    return (await collected(engine, job))[0]


async def handed_over(
    producer: Engine, consumer: Engine, prompt_tokens: Sequence[int], **sampling: Any
) -> tuple[Answer, Answer]:
    """Prefill here, decode there."""
    first = job(prompt_tokens, PREFILL, **sampling)
    prefilled = await answered(producer, first)
    assert prefilled.last.finish_reason == "handover", prefilled.last
    second = job(prompt_tokens, request_id=first.request_id, kv=prefilled.last.kv, **sampling)
    return prefilled, await answered(consumer, second)


def peer_handle(
    engine: Engine, request_id: str, tokens: int = 0, *, expires_at_ms: int = 0, epoch: int = 1
) -> KvHandle:
    """What the router says of a worker whose engine is to write (its promise) or be written to.

    For engines of this module that were started without a worker_id of their own.
    """
    capability = engine.capability
    return KvHandle(
        worker_id=f"worker-{capability.engine_id.rpartition('-')[2]}",
        worker_epoch=epoch,
        engine_id=capability.engine_id,
        engine_request_id=request_id,
        tokens=tokens,
        block_size=capability.block_size,
        expires_at_ms=expires_at_ms or wall_ms() + 60_000,
        params=capability.nixl_metadata,
    )


def paired_jobs(
    producer: Engine,
    consumer: Engine,
    prompt_tokens: Sequence[int],
    orchestration: Orchestration,
    **fields: Any,
) -> tuple[Job, Job]:
    """The prefill and the decode job of one attempt; decode_first lacks its real target yet."""
    fields.setdefault("request_id", f"request-{next(_numbers)}.1")
    request_id = fields["request_id"]
    target = peer_handle(consumer, request_id)
    promise = peer_handle(producer, request_id, len(prompt_tokens))
    fields["orchestration"] = orchestration
    return (
        job(prompt_tokens, PREFILL, kv_target=target, **fields),
        job(prompt_tokens, DECODE, kv=promise, **fields),
    )


async def allocated(consumer: Engine, decode: Job) -> Output:
    """Add a decode_first job and wait until its blocks are allocated; nothing else may run."""
    consumer.add(decode)
    while True:
        for output in await consumer.outputs():
            if output.request_id == decode.request_id:
                return output


async def paired(
    producer: Engine,
    consumer: Engine,
    prompt_tokens: Sequence[int],
    orchestration: Orchestration,
    **fields: Any,
) -> tuple[Answer, Answer]:
    """Both phases at once: the answers of prefill and decode, without decode's allocation."""
    prefill, decode = paired_jobs(producer, consumer, prompt_tokens, orchestration, **fields)
    add = orchestration is Orchestration.CONCURRENT
    if not add:
        output = await allocated(consumer, decode)
        assert output.kv is not None, output
        assert not (output.token_ids or output.text or output.finish_reason)
        prefill = replace(prefill, kv_target=output.kv)
    decoding = asyncio.ensure_future(collected(consumer, decode, add=add))
    return await answered(producer, prefill), (await decoding)[0]

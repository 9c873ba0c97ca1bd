"""A simulated engine alone, whose answers any deployment of such engines has to give.

Recomputes the answer of each request from its record: a second program, beside `log_audit.py`.
Requests that ask for the same are computed once.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from infra.stack.configuration import Settings
from infra.stack.engine_source import start_engine
from schemas.log.clock import wall_ms
from schemas.records import Request, Role, Sampling, WorkPhase
from schemas.rules.tokens import unpack_tokens
from workers.llm.engine import Engine, Job

RUNNING_MAX = 64  # however many requests there are
_QUICK = {"decode_step_ms": 0.5, "prefill_base_ms": 0.1, "transfer": "none", "kv_blocks": 32_768}
_DEADLINE_MS = 300_000


@dataclass(slots=True)
class ExpectedAnswer:
    """What an engine says."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""


async def alone(settings: Settings, requests: Iterable[Request]) -> dict[str, ExpectedAnswer]:
    """The answers of the same requests from one engine without log, peers and transfers."""
    asked = {request.request_id: _asked(request) for request in requests}
    keys = {
        request_id: (prompt, repr(sampling)) for request_id, (prompt, sampling) in asked.items()
    }
    jobs = {keys[request_id]: job for request_id, job in asked.items()}
    engine = await start_engine(
        "sim",
        {**settings.engines.get("sim", {}), **_QUICK},
        model=settings.model,
        roles=[Role.REPLICA],
        worker_id="alone",
        worker_epoch=1,
    )
    try:
        answers = await _answers(engine, list(jobs.values()))
    finally:
        await engine.close()
    found = dict(zip(jobs, answers, strict=True))
    return {request_id: found[key] for request_id, key in keys.items()}


async def _answers(engine: Engine, jobs: Sequence[tuple[bytes, Sampling]]) -> list[ExpectedAnswer]:
    found = [ExpectedAnswer() for _ in jobs]
    begun = running = 0
    while begun < len(jobs) or running:
        while begun < len(jobs) and running < RUNNING_MAX:
            engine.add(_job(str(begun), *jobs[begun]))
            begun, running = begun + 1, running + 1
        for output in await engine.outputs():
            assert output.error is None
            answer = found[int(output.request_id)]
            answer.token_ids += output.token_ids
            answer.text += output.text
            running -= bool(output.finish_reason)
    return found


def _asked(request: Request) -> tuple[bytes, Sampling]:
    """What decides the answer: a greedy one is drawn without the seed."""
    sampling = request.sampling
    if not sampling.temperature:
        sampling = dataclasses.replace(sampling, seed=0)
    return request.prompt_tokens, sampling


def _job(job_id: str, prompt_tokens: bytes, sampling: Sampling) -> Job:
    return Job(
        request_id=job_id,
        phase=WorkPhase.DECODE,
        prompt_tokens=unpack_tokens(prompt_tokens),
        sampling=sampling,
        deadline_ms=wall_ms() + _DEADLINE_MS,
    )

"""Computes the answers that any deployment of simulated engines must give, with one engine alone.

Computes each answer from its `Request`, independently of the log that `log_audit.py` checks.
Computes requests with the same prompt and sampling once.
"""

import dataclasses
from collections.abc import Iterable

from infra.stack.configuration import Settings
from infra.stack.engine_alone import LoneAnswer, generate_answers
from infra.stack.engine_source import start_engine
from schemas.records import Request, Role, Sampling
from schemas.rules.tokens import unpack_tokens

RUNNING_MAX = 64  # requests at once on the engine
_QUICK = {"decode_step_ms": 0.5, "prefill_base_ms": 0.1, "transfer": "none", "kv_blocks": 32_768}


async def answer_alone(settings: Settings, requests: Iterable[Request]) -> dict[str, LoneAnswer]:
    """Return one engine's answer to each request, by id, without log, peers and transfers."""
    inputs = {request.request_id: _engine_input(request) for request in requests}
    keys = {
        request_id: (prompt, repr(sampling)) for request_id, (prompt, sampling) in inputs.items()
    }
    jobs = {keys[request_id]: job for request_id, job in inputs.items()}
    engine = await start_engine(
        "sim",
        {**settings.engines.get("sim", {}), **_QUICK},
        model=settings.model,
        roles=[Role.REPLICA],
        worker_id="alone",
        worker_epoch=1,
    )
    try:
        plain = [(unpack_tokens(prompt), sampling) for prompt, sampling in jobs.values()]
        results = dict(
            zip(jobs, await generate_answers(engine, plain, at_once=RUNNING_MAX), strict=True)
        )
    finally:
        await engine.close()
    return {request_id: results[key] for request_id, key in keys.items()}


def _engine_input(request: Request) -> tuple[bytes, Sampling]:
    """Return the prompt and sampling that decide the answer; greedy sampling ignores the seed."""
    sampling = request.sampling
    if not sampling.temperature:
        sampling = dataclasses.replace(sampling, seed=0)
    return request.prompt_tokens, sampling

"""A simulated engine alone, whose tokens any deployment of such engines has to give."""

from collections.abc import Iterable

from infra.cli.engines import start_engine
from infra.config import Settings
from schemas.codec import unpack_tokens
from schemas.log.clock import wall_ms
from schemas.records import Request, Role, WorkPhase
from tests.e2e.harness import SIM
from workers.llm.engine import Job

RUNNING_MAX = 64  # however many requests there are


async def alone(settings: Settings, requests: Iterable[Request]) -> dict[str, list[int]]:
    """The tokens of the same requests from one engine without log, peers and transfers."""
    engine = await start_engine(
        "sim",
        {**SIM, "decode_step_ms": 0.5, "prefill_base_ms": 0.1, "transfer": "none"},
        model=settings.model,
        roles=[Role.REPLICA],
        worker_id="alone",
        worker_epoch=1,
    )
    answers: dict[str, list[int]] = {}
    left, running = list(requests), 0
    try:
        while left or running:
            while left and running < RUNNING_MAX:
                running += 1
                request = left.pop()
                answers[request.request_id] = []
                engine.add(_job(request))
            for output in await engine.outputs():
                answers[output.request_id] += output.token_ids
                assert output.error is None
                running -= bool(output.finish_reason)
    finally:
        await engine.close()
    return answers


def _job(request: Request) -> Job:
    return Job(
        request_id=request.request_id,
        phase=WorkPhase.DECODE,
        prompt_tokens=unpack_tokens(request.prompt_tokens),
        sampling=request.sampling,
        deadline_ms=wall_ms() + 300_000,
    )

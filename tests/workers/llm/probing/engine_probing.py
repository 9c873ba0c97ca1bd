"""An answer that searches while a real engine generates it, and finds at once what a test says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schemas.records import Passage, Probes, Retrieved
from streams.log.clock import wall_ms
from tests.workers.fakes import work
from tests.workers.llm.probing.probes import search_result
from workers.llm.engine import Engine, Job, Output
from workers.llm.probing.answer import ProbeAsk
from workers.llm.probing.jobs import ProbingJobs


@dataclass
class Searched:
    """What became of it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    records: list[Retrieved] = field(default_factory=list)
    raw: list[Output] = field(default_factory=list)  # what the engine said itself
    last: Output | None = None


async def searched(
    engine: Engine,
    job: Job,
    probes: Probes,
    finds: Callable[[ProbeAsk], Sequence[Passage]] = lambda ask: (),
) -> Searched:
    """The whole answer to a job."""
    asks: list[ProbeAsk] = []
    records: list[Retrieved] = []
    probing = ProbingJobs(
        engine, asks.append, records.append, model_len=engine.capability.max_model_len
    )
    order: Any = replace(work(job.request_id, deadline_ms=job.deadline_ms), probes=probes)
    base = f"{job.request_id}.1"
    result = Searched()

    def hear(outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.request_id != base:  # of a job that was given up; a worker knows none such
                continue
            assert result.last is None
            result.token_ids += output.token_ids
            result.text += output.text
            result.last = output if output.finish_reason else None

    probing.add(replace(job, request_id=base, work=order))
    while result.last is None:
        outputs = await engine.outputs()
        result.raw += outputs
        hear(
            probing.step(
                [output for output in outputs if output.request_id.startswith(base)], wall_ms()
            )
        )
        while asks:
            ask = asks.pop()
            hear(probing.take_result(search_result(ask, *finds(ask)), (), wall_ms()))
        while records:
            result.records.append(record := records.pop())
            hear(probing.record_written(record, wall_ms()))
    return result

"""Reads the log of a stack: who was told what, and who knew what when.

What must hold whatever died in between is audited in `infra/bench/faults/log_audit.py`.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from infra.bench.faults.log_audit import read_topic, with_offsets
from infra.stack.configuration import Settings
from infra.stack.engine_alone import LoneAnswer, generate_answers
from infra.stack.engine_source import start_engine
from schemas.fleet import DEAF_MS
from schemas.records import Heartbeat, JournalBatch, MemberState, Request, Role, Sampling, Work
from schemas.rules.tokens import unpack_tokens
from schemas.settings import LogSettings
from streams.core.fleet.workers import Life
from tests.long_leases import BRIEF_LEASE_MS


async def decoder(log: LogSettings, request_id: str) -> Life:
    """The worker's life that was last told to decode a request."""
    work = [record for record in await read_topic(log, "decode") if isinstance(record, Work)]
    last = max((w for w in work if w.request_id == request_id), key=lambda w: w.attempt)
    return last.worker_id, last.worker_epoch


async def _journal(log: LogSettings, router_id: str) -> list[tuple[str, int, int]]:
    """Topic, offset and time of all that a router applied, in order."""
    batches = [
        record for record in await read_topic(log, "journal") if isinstance(record, JournalBatch)
    ]
    own_batches = [batch for batch in batches if batch.router_id == router_id]
    own_batches.sort(key=lambda batch: (batch.router_epoch, batch.first_seq))
    return [
        line
        for batch in own_batches
        for line in zip(batch.topics, batch.offsets, batch.now_ms, strict=True)
    ]


async def know_workers(log: LogSettings, routers: Iterable[str], workers: set[str]) -> bool:
    """Whether each router has applied a heartbeat of each worker that gives it credits."""
    beats = {
        offset: beat
        for offset, beat in await with_offsets(log, "fleet")
        if isinstance(beat, Heartbeat) and beat.state is MemberState.READY
    }
    for router_id in routers:
        lines = await _journal(log, router_id)
        applied = [beats[at] for topic, at, _ in lines if topic == "fleet" and at in beats]
        giving = [b for b in applied if router_id in {grant.router_id for grant in b.grants}]
        if not workers <= {beat.member_id for beat in giving}:
            return False
    return True


async def overlooked(log: LogSettings, router_id: str, life: Life, noticed_ms: int) -> list[int]:
    """When a router looked and should have noticed by then that a life was over, from its journal.

    A life is over a brief lease after its last record, or after the router has been deaf to all.
    """
    lives = {
        offset: (record.member_id, record.epoch)
        for offset, record in await with_offsets(log, "fleet")
    }
    heard_ms = hearing_since_ms = seen_ms = 0
    times_ms = []
    for topic, offset, now_ms in await _journal(log, router_id):
        is_deaf = now_ms - heard_ms > DEAF_MS
        if topic == "fleet":
            hearing_since_ms = now_ms if is_deaf else hearing_since_ms
            heard_ms = now_ms
            seen_ms = now_ms if lives.get(offset) == life else seen_ms
        elif topic == "tick" and seen_ms and now_ms < noticed_ms and not is_deaf:
            if now_ms - max(seen_ms, hearing_since_ms) > BRIEF_LEASE_MS:
                times_ms.append(now_ms)
    assert seen_ms, f"{router_id} has never heard of {life}"
    return times_ms


RUNNING_MAX = 64  # requests at once on the engine
_QUICK = {"decode_step_ms": 0.5, "prefill_base_ms": 0.1, "transfer": "none", "kv_blocks": 32_768}


async def answer_alone(settings: Settings, requests: Iterable[Request]) -> dict[str, LoneAnswer]:
    """Return the answers to requests, by id, of one engine for each model, without log, peers and
    transfers."""
    by_model: dict[str, list[Request]] = {}
    for request in requests:
        by_model.setdefault(request.model, []).append(request)
    answers: dict[str, LoneAnswer] = {}
    for model, group in by_model.items():
        of_model = settings if len(settings.models) == 1 else settings.for_model(model)
        answers |= await _answer_alone(of_model, group)
    return answers


async def _answer_alone(settings: Settings, requests: Sequence[Request]) -> dict[str, LoneAnswer]:
    engine = await start_engine(
        "sim",
        {**settings.engines.get("sim", {}), **_QUICK},
        model=settings.model,
        roles=[Role.REPLICA],
        worker_id="alone",
        worker_epoch=1,
    )
    answers: dict[str, LoneAnswer] = {}
    try:
        for adapter in sorted({request.adapter for request in requests}):
            group = [request for request in requests if request.adapter == adapter]
            inputs = {request.request_id: _engine_input(request) for request in group}
            keys = {name: (prompt, repr(sampling)) for name, (prompt, sampling) in inputs.items()}
            jobs = {keys[name]: job for name, job in inputs.items()}
            plain = [(unpack_tokens(prompt), sampling) for prompt, sampling in jobs.values()]
            results = await generate_answers(engine, plain, at_once=RUNNING_MAX, adapter=adapter)
            by_job = dict(zip(jobs, results, strict=True))
            answers |= {name: by_job[key] for name, key in keys.items()}
    finally:
        await engine.close()
    return answers


def _engine_input(request: Request) -> tuple[bytes, Sampling]:
    """Return the prompt and sampling that decide the answer; greedy sampling ignores the seed."""
    sampling = request.sampling
    if not sampling.temperature:
        sampling = dataclasses.replace(sampling, seed=0)
    return request.prompt_tokens, sampling

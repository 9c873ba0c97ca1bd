"""Whole stacks for tests: a small client, settings that start quickly, and an audit of the log.

The audit is a second program: it recomputes from the raw topics what must hold whatever died in
between.
"""

import asyncio
import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from aiokafka import ConsumerRecord

from infra.cli.engines import start_engine
from infra.config import Settings
from infra.launcher import Stack
from infra.plan import Plan
from schemas.codec import Codec, unpack_tokens
from schemas.errors import RecordError
from schemas.fleet import HEARTBEAT_MS
from schemas.log.clients import AssignedReader
from schemas.log.clock import wall_ms
from schemas.records import (
    Decision,
    Heartbeat,
    Orchestration,
    Outcome,
    Phase,
    PhaseKind,
    Request,
    Role,
    TokenFrame,
    WorkPhase,
)
from schemas.settings import LogSettings, ModelSettings
from schemas.topics import TOPICS
from streams.config import RouterSettings
from streams.gateway.config import GatewaySettings
from tests.waiting import until
from workers.config import WorkerSettings
from workers.llm.engine import Job

SIM = {"prefill_base_ms": 5.0, "decode_step_ms": 2.0, "end_every_tokens": 0, "running_max": 64}


def sim_settings(
    log: LogSettings,
    *,
    gateway: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    **sim: Any,
) -> Settings:
    """A deployment of simulated engines with real NIXL, on the test's broker and topics."""
    return Settings(
        log=log,
        model=ModelSettings(path="sim"),
        gateway=GatewaySettings(port=0, **(gateway or {})),
        router=RouterSettings(**(router or {})),
        worker=WorkerSettings(engine="sim", drain_timeout_ms=15_000),
        engines={"sim": {**SIM, **sim}},
    )


@asynccontextmanager
async def stack(
    settings: Settings, folder: Path, *, seconds: float = 60, **plan: int
) -> AsyncIterator[Stack]:
    """Start the plan's processes, and stop them whatever happens."""
    counts = {"prefill": 0, "decode": 0, **plan}
    running = Stack(settings, Plan(broker=False, **counts), folder=folder)
    try:
        await running.start(timeout_s=seconds)
        yield running
    finally:
        await running.stop(grace_s=10)


@dataclass
class Answer:
    """What a client saw of one stream."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    event_ids: list[str] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    trivium: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    done: bool = False


class Client:
    """A plain SSE client of one gateway."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        self.http = httpx.AsyncClient(base_url=url, timeout=60)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def body(self, text: str, **fields: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 32,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }

    async def chat(self, text: str, **fields: Any) -> Answer:
        """One whole answer, not streamed."""
        response = await self.http.post("/v1/chat/completions", json=self.body(text, **fields))
        return self.parsed(response)

    def parsed(self, response: httpx.Response) -> Answer:
        found = response.json()
        answer = Answer(status=response.status_code, headers=dict(response.headers))
        if "error" in found:
            answer.error = found["error"]
            return answer
        (choice,) = found["choices"]
        answer.text = choice["message"]["content"]
        answer.token_ids = choice.get("token_ids") or []
        answer.finish_reason = choice["finish_reason"]
        answer.usage = found["usage"]
        return answer

    async def stream(self, text: str, *, into: Answer | None = None, **fields: Any) -> Answer:
        """One answer as a stream; `into` can be looked at while it grows."""
        answer = into if into is not None else Answer()
        options = {"include_usage": True}
        body = self.body(text, stream=True, stream_options=options, **fields)
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            await read_events(response, answer)
        return answer

    async def resume(self, request_id: str, event_id: str) -> Answer:
        """The rest of a stream after an event, from whichever gateway this client speaks to."""
        answer = Answer()
        headers = {"Last-Event-ID": event_id}
        url = f"/v1/requests/{request_id}/events"
        async with self.http.stream("GET", url, headers=headers) as response:
            await read_events(response, answer)
        return answer


async def read_events(response: httpx.Response, answer: Answer) -> None:
    """Fold server-sent events into the answer."""
    answer.status, answer.headers = response.status_code, dict(response.headers)
    if response.status_code != 200:
        answer.error = json.loads(await response.aread())["error"]
        return
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            answer.event_ids.append(line.removeprefix("id: "))
        elif line == "data: [DONE]":
            answer.done = True
        elif line.startswith("data: "):
            fold(json.loads(line.removeprefix("data: ")), answer)


def fold(event: dict[str, Any], answer: Answer) -> None:
    """One chunk."""
    answer.error = event.get("error") or answer.error
    answer.usage = event.get("usage") or answer.usage
    answer.trivium = event.get("trivium") or answer.trivium
    for choice in event.get("choices", []):
        answer.text += choice["delta"].get("content") or ""
        answer.token_ids += choice.get("token_ids") or []
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


async def read_topic(log: LogSettings, topic: str) -> list[Any]:
    """All records of a topic, decoded, in the order of each partition; dead letters stay bytes."""
    dead = topic.endswith(".dlq")
    count = 1 if dead else log.partitions(TOPICS[topic].group)
    reader = AssignedReader(log, topic, range(count), client_id="audit")
    await reader.start("earliest")
    try:
        records = await reader.read_to_end()
    finally:
        await reader.stop()
    return records if dead else [*_decoded(records)]


def _decoded(records: Iterable[ConsumerRecord]) -> Iterator[Any]:
    codec = Codec()
    for record in records:
        with contextlib.suppress(RecordError):  # what a test poisoned
            yield codec.decode(record.value)


async def beaten_ms(log: LogSettings, member_id: str, since_ms: int, until_ms: int) -> int:
    """The time between two moments in a member's heartbeats, which stand while the member does."""
    beats = [
        record
        for record in await read_topic(log, "fleet")
        if isinstance(record, Heartbeat)
        and record.member_id == member_id
        and since_ms < record.at_ms < until_ms
    ]
    return len(beats) * HEARTBEAT_MS


PAIRINGS = (Orchestration.CONCURRENT, Orchestration.DECODE_FIRST)


@dataclass
class Audit:
    """What the raw topics say."""

    requests: dict[str, Request]
    outcomes: dict[str, list[Outcome]]
    decisions: dict[str, list[Decision]]
    phases: dict[str, list[Phase]]
    frames: list[TokenFrame]

    def check(self) -> None:
        """The invariants; each failure names the requests."""
        counts = {request_id: len(self.outcomes[request_id]) for request_id in self.requests}
        assert not {r: n for r, n in counts.items() if n != 1}, "not exactly one outcome"
        assert set(self.outcomes) <= set(self.requests), "an outcome of no request"
        self._check_attempts()
        self._check_ends()

    def _check_attempts(self) -> None:
        for request_id, decisions in self.decisions.items():
            placed = [d.attempt for d in decisions if d.kind in ("place", "replace")]
            assert placed == sorted(set(placed)), f"{request_id}: attempts {placed}"
            assert all(d.reason != "unknown" and d.policy for d in decisions), request_id

    def _check_ends(self) -> None:
        """No token of an attempt follows that attempt's end, and its numbers have no gap.

        Both workers of a pair say the first token, and prefill's may reach the log after an end
        that decode wrote; gateways drop it.
        """
        says_first = {
            (decision.request_id, decision.attempt): decision.prefill_worker
            for decisions in self.decisions.values()
            for decision in decisions
            if decision.orchestration in PAIRINGS
        }
        ended: set[tuple[str, int]] = set()
        next_seq: dict[tuple[str, int], int] = defaultdict(int)
        for frame in self.frames:
            rows = zip(
                frame.request_ids, frame.attempts, frame.first_seqs, frame.token_counts, strict=True
            )
            for request_id, attempt, first, count in rows:
                stream = (request_id, attempt)
                late_copy = frame.worker_id == says_first.get(stream) and first + count == 1
                assert stream not in ended or late_copy, f"{stream}: tokens after the end"
                assert first <= next_seq[stream], f"{stream}: gap before {first}"
                next_seq[stream] = max(next_seq[stream], first + count)
            ended.update((end.request_id, end.attempt) for end in frame.ends)

    def kinds(self) -> Counter[str]:
        return Counter(outcomes[0].kind.value for outcomes in self.outcomes.values())

    def kv_bytes(self) -> int:
        """Bytes that decode workers received over NIXL."""
        return sum(
            phase.kv_bytes
            for phases in self.phases.values()
            for phase in phases
            if phase.kind is PhaseKind.KV_RECEIVED
        )


async def audit(log: LogSettings) -> Audit:
    """Read the log once every accepted request has its outcome; fails after a while otherwise."""

    async def settled() -> bool:
        requests = await read_topic(log, "requests")
        outcomes = await read_topic(log, "outcomes")
        return {r.request_id for r in requests} <= {o.request_id for o in outcomes}

    with contextlib.suppress(TimeoutError):  # check() names what is missing
        await until(settled, seconds=20)
    topics = ("requests", "outcomes", "decisions", "phases", "tokens")
    read = await asyncio.gather(*(read_topic(log, topic) for topic in topics))
    grouped: list[dict[str, list[Any]]] = []
    for records in read[1:4]:
        by_id: dict[str, list[Any]] = defaultdict(list)
        for record in records:
            by_id[record.request_id].append(record)
        grouped.append(by_id)
    requests = {request.request_id: request for request in read[0]}
    found = Audit(requests, grouped[0], grouped[1], grouped[2], read[4])
    found.check()
    return found


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
    for request in requests:
        answers[request.request_id] = []
        engine.add(
            Job(
                request_id=request.request_id,
                phase=WorkPhase.DECODE,
                prompt_tokens=unpack_tokens(request.prompt_tokens),
                sampling=request.sampling,
                deadline_ms=wall_ms() + 60_000,
            )
        )
    left = len(answers)
    try:
        while left:
            for output in await engine.outputs():
                answers[output.request_id] += output.token_ids
                assert output.error is None
                left -= bool(output.finish_reason)
    finally:
        await engine.close()
    return answers

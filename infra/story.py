"""A request's story, read back from the log: who did what, when, with which bytes.

Reads the topics whole, so it is for demos, tests and questions afterwards, never for serving.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from schemas.codec import Codec
from schemas.errors import NotFound, RecordError
from schemas.log.clients import AssignedReader
from schemas.records import (
    Decision,
    Outcome,
    Phase,
    PhaseKind,
    Request,
    TokenFrame,
    Work,
    WorkPhase,
)
from schemas.registry import make_codec
from schemas.settings import LogSettings
from schemas.topics import TOPICS

_TOLD = ("requests", "decisions", "prefill", "decode", "phases", "tokens", "outcomes")


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the story; `after_ms` counts from the request's arrival at its gateway."""

    after_ms: int
    who: str
    what: str


@dataclass(slots=True)
class Story:
    """All records of one request, and the tokens of its answer."""

    request: Request
    decisions: list[Decision] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    first_token_ms: int = 0
    last_token_ms: int = 0
    frames: int = 0
    outcome: Outcome | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes received over NIXL."""
        return sum(phase.kv_bytes for phase in self.phases)

    def steps(self) -> list[Step]:
        """What happened, in order of time."""
        start_ms = self.request.arrived_ms
        found = [Step(at_ms - start_ms, who, what) for at_ms, who, what in self._events()]
        return sorted(found, key=lambda step: step.after_ms)

    def _events(self) -> Iterator[tuple[int, str, str]]:
        request = self.request
        prompt_tokens = len(request.prompt_tokens) // 4
        yield request.arrived_ms, request.gateway_id, f"accepted, {prompt_tokens} prompt tokens"
        for decision in self.decisions:
            yield decision.at_ms, decision.router_id, _decided(decision)
        for work in self.work:
            where = "prefill" if work.phase is WorkPhase.PREFILL else "decode"
            yield work.dispatched_ms, work.router_id, f"dispatched {where} to {work.worker_id}"
        for phase in self.phases:
            yield phase.ended_ms, phase.worker_id, _finished(phase)
        if self.first_token_ms:
            yield self.first_token_ms, self._first_worker(), "first token on its way"
        if self.outcome is not None:
            outcome = self.outcome
            tokens = f"{outcome.completion_tokens} tokens in {self.frames} frames"
            yield outcome.ended_ms, outcome.written_by, f"{outcome.kind.value}: {tokens}"

    def _first_worker(self) -> str:
        done = [phase for phase in self.phases if phase.kind is PhaseKind.PREFILL_DONE]
        return done[0].worker_id if done else (self.outcome.decode_worker if self.outcome else "")


def _decided(decision: Decision) -> str:
    chosen = [worker for worker in (decision.prefill_worker, decision.decode_worker) if worker]
    where = f" {decision.mode.value} on {' and '.join(chosen)}" if chosen else ""
    return f"{decision.kind.value}{where}: {decision.reason.value} ({decision.policy})"


def _finished(phase: Phase) -> str:
    what = phase.kind.value.replace("_", " ")
    if phase.kind is PhaseKind.PREFILL_DONE:
        computed = phase.prompt_tokens - phase.cached_tokens
        took_ms = phase.ended_ms - phase.started_ms
        return f"{what}: {computed} tokens computed, {phase.cached_tokens} cached, {took_ms} ms"
    if phase.kind is PhaseKind.KV_RECEIVED:
        return f"{what}: {phase.kv_bytes:,} bytes over NIXL in {phase.transfer_ms:.1f} ms"
    return f"{what}: {phase.error.message if phase.error else ''}"


async def read_stories(log: LogSettings) -> dict[str, Story]:
    """The story of every request on the log, by request id."""
    codec = await asyncio.to_thread(make_codec, log)
    records = await asyncio.gather(*(_read(log, topic, codec) for topic in _TOLD))
    requests, decisions, prefill, decode, phases, frames, outcomes = records
    stories = {request.request_id: Story(request) for request in requests}
    for kind, found in (
        ("decisions", decisions),
        ("work", [w for w in (*prefill, *decode) if isinstance(w, Work)]),
        ("phases", phases),
    ):
        for record in found:
            if record.request_id in stories:
                getattr(stories[record.request_id], kind).append(record)
    for outcome in outcomes:
        story = stories.get(outcome.request_id)
        if story is not None and story.outcome is None:  # the first by offset counts
            story.outcome = outcome
    for frame in frames:
        _fold_frame(stories, frame)
    return stories


async def read_story(log: LogSettings, request_id: str) -> Story:
    """One request's story; raises NotFound."""
    stories = await read_stories(log)
    if request_id not in stories:
        raise NotFound(f"{request_id}: no such request on {log.topic_prefix}requests")
    return stories[request_id]


def _fold_frame(stories: dict[str, Story], frame: TokenFrame) -> None:
    place = 0
    for request_id, first, count in zip(
        frame.request_ids, frame.first_seqs, frame.token_counts, strict=True
    ):
        tokens = frame.token_ids[place : place + count]
        place += count
        story = stories.get(request_id)
        if story is None:
            continue
        story.first_token_ms = story.first_token_ms or frame.at_ms
        story.last_token_ms = frame.at_ms
        story.frames += 1
        held = len(story.token_ids)
        if first <= held:  # a later attempt repeats what an earlier one sent
            story.token_ids += tokens[held - first :]


async def _read(log: LogSettings, topic: str, codec: Codec) -> list[Any]:
    partitions = range(log.partitions(TOPICS[topic].group))
    reader = AssignedReader(log, topic, partitions, client_id="story")
    await reader.start("earliest")
    try:
        found = await reader.read_to_end()
    finally:
        await reader.stop()
    records = []
    for record in found:
        try:
            records.append(codec.decode(record.value))
        except RecordError:
            continue  # whoever had to read it has put it on the dead-letter topic
    return records

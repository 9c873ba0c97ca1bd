"""Reads the log of a stack: an audit of what must hold whatever died in between, and who knew what.

A second program: it recomputes from the raw topics.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiokafka import ConsumerRecord

from schemas.errors import RecordError
from schemas.fleet import LEASE_MS
from schemas.log.clients import AssignedReader
from schemas.records import (
    Decision,
    Heartbeat,
    JournalBatch,
    MemberState,
    Orchestration,
    Outcome,
    Phase,
    PhaseKind,
    Request,
    TokenFrame,
    Work,
)
from schemas.registry import make_codec
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.core.fleet import DEAF_MS, Life
from tests.waiting import until

PAIRINGS = (Orchestration.CONCURRENT, Orchestration.DECODE_FIRST)


async def read_raw(log: LogSettings, topic: str) -> list[ConsumerRecord]:
    """All records of a topic, in the order of each partition."""
    dead = topic.endswith(".dlq")
    count = 1 if dead else log.partitions(TOPICS[topic].group)
    reader = AssignedReader(log, topic, range(count), client_id="audit")
    await reader.start("earliest")
    try:
        return await reader.read_to_end()
    finally:
        await reader.stop()


async def read_topic(log: LogSettings, topic: str) -> list[Any]:
    """The same, decoded."""
    return [record for _, record in await _with_offsets(log, topic)]


async def _with_offsets(log: LogSettings, topic: str) -> list[tuple[int, Any]]:
    codec, found = await asyncio.to_thread(make_codec, log), []
    for record in await read_raw(log, topic):
        with contextlib.suppress(RecordError):  # what a test poisoned
            found.append((record.offset, codec.decode(record.value)))
    return found


async def decoder(log: LogSettings, request_id: str) -> Life:
    """The worker's life that was last told to decode a request."""
    work = [each for each in await read_topic(log, "decode") if isinstance(each, Work)]
    last = max((w for w in work if w.request_id == request_id), key=lambda w: w.attempt)
    return last.worker_id, last.worker_epoch


async def _journal(log: LogSettings, router_id: str) -> list[tuple[str, int, int]]:
    """Topic, offset and time of all that a router applied, in order."""
    batches: list[JournalBatch] = await read_topic(log, "journal")
    mine = [batch for batch in batches if batch.router_id == router_id]
    mine.sort(key=lambda batch: (batch.router_epoch, batch.first_seq))
    return [
        line
        for batch in mine
        for line in zip(batch.topics, batch.offsets, batch.now_ms, strict=True)
    ]


async def know_workers(log: LogSettings, routers: Iterable[str], workers: set[str]) -> bool:
    """Whether each router has applied a heartbeat of each worker that gives it credits."""
    beats = {
        offset: beat
        for offset, beat in await _with_offsets(log, "fleet")
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

    A life is over a lease after its last record, or after the router has been deaf to all.
    """
    lives = {
        offset: (record.member_id, record.epoch)
        for offset, record in await _with_offsets(log, "fleet")
    }
    heard_ms = hearing_since_ms = seen_ms = 0
    found = []
    for topic, offset, now_ms in await _journal(log, router_id):
        is_deaf = now_ms - heard_ms > DEAF_MS
        if topic == "fleet":
            hearing_since_ms = now_ms if is_deaf else hearing_since_ms
            heard_ms = now_ms
            seen_ms = now_ms if lives.get(offset) == life else seen_ms
        elif topic == "tick" and seen_ms and now_ms < noticed_ms and not is_deaf:
            if now_ms - max(seen_ms, hearing_since_ms) > LEASE_MS:
                found.append(now_ms)
    assert seen_ms, f"{router_id} has never heard of {life}"
    return found


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
        that decode wrote; a frame without acknowledgement is sent again. Gateways drop both.
        """
        says_first = {
            (decision.request_id, decision.attempt): decision.prefill_worker
            for decisions in self.decisions.values()
            for decision in decisions
            if decision.orchestration in PAIRINGS
        }
        ended: set[tuple[str, int]] = set()
        said: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
        for frame in self.frames:
            columns = (frame.first_seqs, frame.token_counts, frame.first_chars, frame.texts)
            rows = zip(frame.request_ids, frame.attempts, *columns, strict=True)
            for request_id, attempt, first, count, char, text in rows:
                stream = (request_id, attempt)
                tokens, chars = said[stream]
                late_copy = frame.worker_id == says_first.get(stream) and first + count == 1
                is_repeat = first + count <= tokens and char + len(text) <= chars
                assert stream not in ended or late_copy or is_repeat, f"{stream}: after the end"
                assert first <= tokens, f"{stream}: gap before {first}"
                said[stream] = (max(tokens, first + count), max(chars, char + len(text)))
            ended.update((end.request_id, end.attempt) for end in frame.ends)

    def kinds(self) -> Counter[str]:
        return Counter(outcomes[0].kind.value for outcomes in self.outcomes.values())

    def of_kind(self, kind: str) -> list[Decision]:
        """All decisions of one kind."""
        return [d for decisions in self.decisions.values() for d in decisions if d.kind == kind]

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
        await until(settled)
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

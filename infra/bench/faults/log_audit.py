"""Checks from the raw topics the invariants that must hold whichever processes die.

Shares no state with the processes that it checks. The end-to-end tests and the benchmarks that kill
processes call it.
"""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from aiokafka import ConsumerRecord

from schemas.errors import RecordError
from schemas.records import (
    AnswerDelta,
    Continued,
    Decision,
    Orchestration,
    Outcome,
    Phase,
    PhaseKind,
    Request,
    Retrieved,
    TokenFrame,
)
from schemas.rules.outcomes import counting_outcome
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.calls.stream.parsed import deltas_by_row
from streams.log.clients import AssignedReader
from streams.log.registry import make_codec

PAIRINGS = (Orchestration.CONCURRENT, Orchestration.DECODE_FIRST)
SETTLE_S = 60.0  # timeout of requests in flight
_POLL_S = 0.2
_NAMED_MAX = 5  # request ids in the text of a violation


async def read_raw(log: LogSettings, topic: str) -> list[ConsumerRecord]:
    """Return all raw records of a topic, in the order of each partition."""
    dead = topic.endswith(".dlq")
    count = 1 if dead else log.partitions(TOPICS[topic].group)
    reader = AssignedReader(log, topic, range(count), client_id="audit")
    async with reader.reading("earliest"):
        return await reader.read_to_end()


async def read_topic(log: LogSettings, topic: str) -> list[Any]:
    """Return all decoded records of a topic, in the order of each partition."""
    return [record for _, record in await with_offsets(log, topic)]


async def with_offsets(log: LogSettings, topic: str) -> list[tuple[int, Any]]:
    """Return decoded records with their offsets; undecodable ones are left out."""
    codec, decoded = await asyncio.to_thread(make_codec, log), []
    for record in await read_raw(log, topic):
        with contextlib.suppress(RecordError):  # records that a test made undecodable
            decoded.append((record.offset, codec.decode(record.value)))
    return decoded


@dataclass
class DeltaChecker:
    """Checks that a parsed answer has the same deltas after the same tokens in every attempt.

    Rows of workers and attempts begin and end at different tokens; a delta names its token.
    """

    parsed: Collection[str]  # ids of requests whose answers are parsed
    _digests: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    _deltas: dict[tuple[str, int, int], list[AnswerDelta]] = field(default_factory=dict)

    def differences(self, frame: TokenFrame) -> Iterator[str]:
        """Yield the places of a frame whose deltas differ from those of earlier frames."""
        by_row, at = deltas_by_row(frame), 0
        columns = (frame.request_ids, frame.attempts, frame.first_seqs, frame.token_counts)
        for request_id, attempt, first, count in zip(*columns, strict=True):
            token_ids, at = frame.token_ids[at : at + count], at + count
            if request_id not in self.parsed:
                continue
            digests = self._digests_of(request_id, attempt, first)
            row = by_row.get((request_id, attempt, first), ())
            for seq, token_id in enumerate(token_ids, first + 1):
                digests[seq] = crc32(b"%d " % token_id, digests.get(seq - 1, 0))
                deltas = [delta for delta in row if delta.seq == seq]
                if self._deltas.setdefault((request_id, seq, digests[seq]), deltas) != deltas:
                    yield f"{(request_id, attempt)}: other deltas after token {seq}"
        for end in frame.ends:
            if not end.seq or end.request_id not in self.parsed:
                continue
            digest = self._digests.get((end.request_id, end.attempt), {}).get(end.seq, 0)
            place = (end.request_id, -end.seq, digest)
            if self._deltas.setdefault(place, list(end.deltas)) != list(end.deltas):
                yield f"{(end.request_id, end.attempt)}: other deltas of the end"

    def _digests_of(self, request_id: str, attempt: int, first: int) -> dict[int, int]:
        """Return the digests of an attempt's tokens, by their number; it may continue earlier
        ones."""
        digests = self._digests.setdefault((request_id, attempt), {})
        if first and first not in digests:
            for earlier in range(attempt - 1, 0, -1):
                prior = self._digests.get((request_id, earlier), {})
                if first in prior:
                    digests[first] = prior[first]
                    break
        return digests


@dataclass
class StreamChecker:
    """Checks that no token of an attempt follows that attempt's end, and that no token is missing.

    Both workers of a pair write the first token, and the prefill worker's may reach the log after
    an end that the decode worker wrote. A frame without acknowledgement is sent again. Gateways
    drop both. An attempt may continue after the tokens of the attempt before, as of its void mark.
    """

    says_first: dict[tuple[str, int], str]  # prefill worker of each attempt by a pair
    deltas: DeltaChecker
    violations: list[str] = field(default_factory=list)
    _finished_streams: set[tuple[str, int]] = field(default_factory=set)
    _lengths: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    _resume_lengths: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def read(self, frame: TokenFrame) -> None:
        """Check the next frame of its partition."""
        self.violations += self.deltas.differences(frame)
        columns = (frame.first_seqs, frame.token_counts, frame.first_chars, frame.texts)
        rows = zip(frame.request_ids, frame.attempts, *columns, strict=True)
        for request_id, attempt, first, count, char, text in rows:
            stream = (request_id, attempt)
            tokens, chars = self._length_of(stream)
            late_copy = frame.worker_id == self.says_first.get(stream) and first + count == 1
            is_repeat = first + count <= tokens and char + len(text) <= chars
            if stream in self._finished_streams and not late_copy and not is_repeat:
                self.violations.append(f"{stream}: after the end")
            if first > tokens:
                self.violations.append(f"{stream}: gap before {first}")
            self._lengths[stream] = (max(tokens, first + count), max(chars, char + len(text)))
        self._finished_streams.update((end.request_id, end.attempt) for end in frame.ends)
        for void in frame.voids:
            following = (void.request_id, void.attempt + 1)
            self._resume_lengths.setdefault(
                following, self._length_of((void.request_id, void.attempt))
            )

    def _length_of(self, stream: tuple[str, int]) -> tuple[int, int]:
        return self._lengths.get(stream) or self._resume_lengths.get(stream, (0, 0))


@dataclass
class LogAudit:
    """The records of the raw topics, by request, and checks of them."""

    requests: dict[str, Request]
    outcomes: dict[str, list[Outcome]]
    decisions: dict[str, list[Decision]]
    phases: dict[str, list[Phase]]
    frames: list[TokenFrame]

    def check(self) -> None:
        """Check the invariants; an AssertionError names the requests that violate them."""
        violations = list(self.violations())
        assert not violations, "\n".join(violations)

    def violations(self) -> Iterator[str]:
        """Yield each broken rule with its requests."""
        counts = {
            request_id: _counting(self.outcomes.get(request_id, ())) for request_id in self.requests
        }
        yield from _describe("without an outcome", (r for r, n in counts.items() if n == 0))
        yield from _describe("with several outcomes", (r for r, n in counts.items() if n > 1))
        yield from _describe("an outcome of no request", set(self.outcomes) - set(self.requests))
        for request_id, decisions in self.decisions.items():
            placed = [d.attempt for d in decisions if d.kind in ("place", "replace")]
            if placed != sorted(set(placed)):
                yield f"{request_id}: attempts {placed}"
            if any(d.reason == "unknown" or not d.policy for d in decisions):
                yield f"{request_id}: a decision without reason or policy"
        yield from self._ends()

    def _ends(self) -> Iterator[str]:
        says_first = {
            (decision.request_id, decision.attempt): decision.prefill_worker
            for decisions in self.decisions.values()
            for decision in decisions
            if decision.orchestration in PAIRINGS
        }
        parsed = {name for name, request in self.requests.items() if request.parsing is not None}
        ends = StreamChecker(says_first, DeltaChecker(parsed))
        for frame in self.frames:
            ends.read(frame)
        yield from ends.violations

    def kinds(self) -> Counter[str]:
        """Return the number of requests by the kind of their outcome."""
        ends = (counting_outcome(outcomes) for outcomes in self.outcomes.values())
        return Counter(end.kind.value for end in ends if end is not None)

    def of_kind(self, kind: str) -> list[Decision]:
        """Return all decisions of one kind."""
        return [d for decisions in self.decisions.values() for d in decisions if d.kind == kind]

    def kv_bytes(self) -> int:
        """Return the bytes of KV that decode workers received over NIXL."""
        return sum(
            phase.kv_bytes
            for phases in self.phases.values()
            for phase in phases
            if phase.kind is PhaseKind.KV_RECEIVED
        )


def _counting(outcomes: Collection[Outcome]) -> int:
    """Return the number of distinct outcomes of the attempt that counts; records may repeat."""
    end = counting_outcome(outcomes)
    return len({repr(outcome) for outcome in outcomes if end and outcome.attempt == end.attempt})


def _describe(what: str, request_ids: Iterable[str]) -> Iterator[str]:
    ordered_ids = sorted(request_ids)
    if ordered_ids:
        suffix = ", ..." if len(ordered_ids) > _NAMED_MAX else ""
        yield f"{len(ordered_ids)} {what}: {', '.join(ordered_ids[:_NAMED_MAX])}{suffix}"


async def wait_settled(log: LogSettings, *, seconds: float = SETTLE_S) -> bool:
    """Return whether every accepted request gets its outcome within `seconds`."""
    end_s = time.monotonic() + seconds
    while True:
        requests = await read_topic(log, "requests")
        outcomes = await read_topic(log, "outcomes")
        if {r.request_id for r in requests} <= {o.request_id for o in outcomes}:
            return True
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(_POLL_S)


async def read_audit(log: LogSettings) -> LogAudit:
    """Read the current records of the log, without checking them."""
    topics = ("requests", "outcomes", "decisions", "phases", "tokens")
    read = await asyncio.gather(*(read_topic(log, topic) for topic in topics))
    grouped: list[dict[str, list[Any]]] = []
    for records in read[1:4]:
        by_id: dict[str, list[Any]] = defaultdict(list)
        for record in records:
            if not isinstance(record, Retrieved | Continued):  # also on `phases`
                by_id[record.request_id].append(record)
        grouped.append(by_id)
    requests = {request.request_id: request for request in read[0]}
    return LogAudit(requests, grouped[0], grouped[1], grouped[2], read[4])


async def audit(log: LogSettings) -> LogAudit:
    """Read and check the log once every request has its outcome, or after `SETTLE_S`."""
    await wait_settled(log)
    result = await read_audit(log)
    result.check()
    return result

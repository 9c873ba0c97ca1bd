"""Reads the traffic of a recording, and makes scripts of it for simulated clients.

The rows come from a file of `trivium record`; the workers are those that the replayed routers know
at the end. In a script, the first request of a conversation is sent at its recorded time, a later
one as long after the previous answer as it was recorded. Requests of a trace are all sent at their
times.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infra.replay.replaying import ReplayReport, Watch, replay
from infra.simulator.traffic import traces
from infra.simulator.traffic.script import SimConversation, SimTurn, conversation
from infra.traces.recording import SNAPSHOT, open_recording
from infra.traces.trace import Trace
from schemas.errors import RecordError
from schemas.fleet import Member
from schemas.records import (
    Decision,
    MemberKind,
    Outcome,
    OutcomeKind,
    Phase,
    Request,
)
from schemas.rules.outcomes import counting_outcomes
from schemas.rules.tokens import token_count
from streams.config import RouterSettings
from streams.core.requests.recovery import PLACING

if TYPE_CHECKING:
    from streams.core.router import Router


@dataclass(slots=True)
class RecordedTraffic:
    """Requests to a deployment, with their placements and outcomes."""

    settings: RouterSettings
    workers: list[Member]
    requests: dict[str, Request] = field(default_factory=dict)
    placements: dict[str, Decision] = field(default_factory=dict)  # the last placement of each
    phases: list[Phase] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # that count
    replayed: ReplayReport = field(default_factory=ReplayReport)

    @property
    def completed(self) -> list[Outcome]:
        """Return the outcomes of answers that completed."""
        return [
            outcome for outcome in self.outcomes.values() if outcome.kind is OutcomeKind.COMPLETED
        ]


def read(path: Path, watch: Watch = lambda router: None) -> RecordedTraffic:
    """Replay and read a recording; raises RecordError if it has no completed answer or no worker.

    `watch` is called with each router that is replayed.
    """
    routers: list[Router] = []

    def keep(router: "Router") -> None:
        routers.append(router)
        watch(router)

    report = replay(path, keep)
    members: dict[str, Member] = {}
    for router in routers:
        members |= router.tables.fleet.view.members
    workers = [member for member in members.values() if member.registration.capability is not None]
    workers = [member for member in workers if member.registration.kind is MemberKind.WORKER]
    traffic = RecordedTraffic(
        routers[-1].settings,
        sorted(workers, key=lambda member: member.member_id),
        replayed=report,
    )
    outcomes: list[Outcome] = []
    read_places: set[tuple[str, int, int]] = set()
    with open_recording(path) as recording:
        since_ms, until_ms = recording.about["since_ms"], recording.about["until_ms"]
        for row in recording.rows():
            position = row.topic, row.partition, row.offset
            if row.kind == SNAPSHOT or row.topic not in _READ or position in read_places:
                continue
            read_places.add(position)  # a router that took over may have read it, too
            record: Any = recording.codec.decode(row.value)
            match record:
                case Request() if since_ms <= record.arrived_ms < until_ms:
                    traffic.requests[record.request_id] = record
                case Phase():
                    traffic.phases.append(record)
                case Decision() if record.kind in PLACING:
                    traffic.placements[record.request_id] = record
                case Outcome():
                    outcomes.append(record)
    ends = counting_outcomes(outcomes)
    traffic.outcomes = {name: ends[name] for name in traffic.requests if name in ends}
    if not traffic.completed or not traffic.workers:
        raise RecordError(f"{path}: expected complete answers and workers to simulate, found none")
    return traffic


_READ = ("requests", "phases", "decisions", "outcomes")


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """A script for simulated clients, and the recorded id of each of its requests."""

    conversations: list[SimConversation]
    request_ids: dict[str, str]


def simulated_load(
    source: RecordedTraffic | Trace, *, begin_ms: float, block_tokens: int
) -> SimulatedLoad:
    """Return conversations: a recording's, or each request of a trace as one of its own.

    Requests of a recording without a complete answer are left out.
    """
    if isinstance(source, RecordedTraffic):
        return _recorded_load(source, begin_ms, block_tokens)
    conversations = traces.script(
        source.arrivals,
        begin_ms=begin_ms,
        faster=1.0,
        block_tokens=block_tokens,
        named_tokens=source.block_tokens,
    )
    return SimulatedLoad(conversations, {f"{chat.name}-1": chat.name for chat in conversations})


def _recorded_load(traffic: RecordedTraffic, begin_ms: float, block_tokens: int) -> SimulatedLoad:
    answers = {outcome.request_id: outcome for outcome in traffic.completed}
    requests = [request for request in traffic.requests.values() if request.request_id in answers]
    requests.sort(key=lambda request: (request.arrived_ms, request.request_id))
    first_ms = requests[0].arrived_ms
    chains: dict[tuple[str, str], list[list[Request]]] = defaultdict(list)
    for request in requests:
        session_parts = chains[request.tenant, request.session_id]
        if session_parts and _follows(request, session_parts[-1][-1], answers):
            session_parts[-1].append(request)
        else:
            session_parts.append([request])
    conversations: list[SimConversation] = []
    names: dict[str, str] = {}
    for (_, session_id), parts in chains.items():
        turns_before = 0
        for part in parts:
            conversations.append(
                _conversation(
                    part,
                    answers,
                    at_ms=begin_ms + part[0].arrived_ms - first_ms,
                    block_tokens=block_tokens,
                    session_id=session_id,
                    turns_before=turns_before,
                )
            )
            turns_before += len(part)
            names |= {
                f"{conversations[-1].name}-{n}": request.request_id
                for n, request in enumerate(part, 1)
            }
    return SimulatedLoad(sorted(conversations, key=lambda chat: (chat.at_ms, chat.name)), names)


def _follows(request: Request, before: Request, answers: Mapping[str, Outcome]) -> bool:
    """Return whether a request came after the answer and its prompt extends the turn before."""
    answer = answers[before.request_id]
    tokens_before = token_count(before.prompt_tokens) + answer.completion_tokens
    return (
        request.arrived_ms >= answer.ended_ms
        and request.prompt_tokens.startswith(before.prompt_tokens)
        and token_count(request.prompt_tokens) >= tokens_before
    )


def _conversation(
    part: Sequence[Request],
    answers: Mapping[str, Outcome],
    *,
    at_ms: float,
    block_tokens: int,
    session_id: str,
    turns_before: int,
) -> SimConversation:
    turns, ended_ms = [], part[0].arrived_ms
    for request in part:
        answer = answers[request.request_id]
        turns.append(
            SimTurn(
                prompt_tokens=token_count(request.prompt_tokens),
                output_tokens=max(1, answer.completion_tokens),
                think_ms=float(request.arrived_ms - ended_ms),
            )
        )
        ended_ms = answer.ended_ms
    last = np.frombuffer(part[-1].prompt_tokens, "<i4")
    tokens = np.concatenate((last, np.full(turns[-1].output_tokens, -1, np.int32)))
    return conversation(
        part[0].request_id,
        at_ms,
        turns,
        tokens,
        block_tokens,
        session_id=session_id,
        turns_before=turns_before,
        tenant=part[0].tenant,
        cache_scope=part[0].cache_scope,
    )

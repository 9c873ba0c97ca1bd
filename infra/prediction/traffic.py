"""What a recording tells of its traffic: requests, where they ran, how they ended, and the fleet.

Read from the rows of a file of `trivium record`; the fleet is what the replayed routers know of it
in the end. Conversations come out as scripts for simulated clients: the first request of each comes
when it came, later ones as long after the answer before as they did.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infra.replay.recording import SNAPSHOT, opened
from infra.replay.replaying import replay
from infra.simulator.traffic.script import Conversation, Turn, conversation
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
class Traffic:
    """What was asked of a deployment, and what became of it."""

    settings: RouterSettings
    workers: list[Member]
    requests: dict[str, Request] = field(default_factory=dict)
    placed: dict[str, Decision] = field(default_factory=dict)  # the last placement of each
    phases: list[Phase] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # those that count

    @property
    def completed(self) -> list[Outcome]:
        """Answers that are whole."""
        return [each for each in self.outcomes.values() if each.kind is OutcomeKind.COMPLETED]


def read(path: Path) -> Traffic:
    """Raises RecordError where the file has nothing that can be simulated."""
    routers: list[Router] = []
    replay(path, routers.append)
    members: dict[str, Member] = {}
    for router in routers:
        members |= router.tables.fleet.view.members
    workers = [each for each in members.values() if each.registration.capability is not None]
    workers = [each for each in workers if each.registration.kind is MemberKind.WORKER]
    traffic = Traffic(routers[-1].settings, sorted(workers, key=lambda each: each.member_id))
    outcomes: list[Outcome] = []
    seen: set[tuple[str, int, int]] = set()
    with opened(path) as recording:
        since_ms, until_ms = recording.about["since_ms"], recording.about["until_ms"]
        for row in recording.rows():
            place = row.topic, row.partition, row.offset
            if row.kind == SNAPSHOT or row.topic not in _READ or place in seen:
                continue
            seen.add(place)  # a router's next life may have it, too
            record: Any = recording.codec.decode(row.value)
            match record:
                case Request() if since_ms <= record.arrived_ms < until_ms:
                    traffic.requests[record.request_id] = record
                case Phase():
                    traffic.phases.append(record)
                case Decision() if record.kind in PLACING:
                    traffic.placed[record.request_id] = record
                case Outcome():
                    outcomes.append(record)
    ends = counting_outcomes(outcomes)
    traffic.outcomes = {name: ends[name] for name in traffic.requests if name in ends}
    if not traffic.completed or not traffic.workers:
        raise RecordError(f"{path}: has no answer, or no worker, from which to predict anything")
    return traffic


_READ = ("requests", "phases", "decisions", "outcomes")


def script(
    traffic: Traffic, *, begin_ms: float, block_tokens: int
) -> tuple[list[Conversation], dict[str, str]]:
    """The same conversations, and which recorded request each of theirs stands for; requests
    without a whole answer are left out."""
    answers = {each.request_id: each for each in traffic.completed}
    asked = [each for each in traffic.requests.values() if each.request_id in answers]
    asked.sort(key=lambda each: (each.arrived_ms, each.request_id))
    first_ms = asked[0].arrived_ms
    chains: dict[tuple[str, str], list[list[Request]]] = defaultdict(list)
    for request in asked:
        known = chains[request.tenant, request.session_id]
        if known and _follows(request, known[-1][-1], answers):
            known[-1].append(request)
        else:
            known.append([request])
    found: list[Conversation] = []
    names: dict[str, str] = {}
    for (_, session_id), parts in chains.items():
        turns_before = 0
        for part in parts:
            found.append(
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
            names |= {f"{found[-1].name}-{n}": each.request_id for n, each in enumerate(part, 1)}
    return sorted(found, key=lambda each: (each.at_ms, each.name)), names


def _follows(request: Request, before: Request, answers: Mapping[str, Outcome]) -> bool:
    """Whether it was asked after the answer, and says all that was said before it."""
    said = answers[before.request_id]
    room = token_count(before.prompt_tokens) + said.completion_tokens
    return (
        request.arrived_ms >= said.ended_ms
        and request.prompt_tokens.startswith(before.prompt_tokens)
        and token_count(request.prompt_tokens) >= room
    )


def _conversation(
    part: Sequence[Request],
    answers: Mapping[str, Outcome],
    *,
    at_ms: float,
    block_tokens: int,
    session_id: str,
    turns_before: int,
) -> Conversation:
    turns, ended_ms = [], part[0].arrived_ms
    for request in part:
        answer = answers[request.request_id]
        turns.append(
            Turn(
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

"""Makes the records that the decision benchmark feeds to the router, as the log would have them.

A fleet of prefill, decode and replica workers, conversations with shared system prompts, and the
blocks of these in the workers' prefix caches. Deterministic by seed; measures nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from schemas.prefix import chain, pack
from schemas.records import (
    Capability,
    Endpoint,
    Grant,
    Heartbeat,
    KvEvents,
    KvHandle,
    Lease,
    Load,
    MemberKind,
    MemberState,
    Orchestration,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Priority,
    Registration,
    Request,
    Role,
    Sampling,
    Session,
    Work,
)
from schemas.rules.tokens import pack_tokens, token_count

ROUTER, BLOCK, WINDOW = "router", 16, 64
SYSTEM_PROMPTS, SYSTEM_TOKENS, HISTORY_TOKENS = 8, 1_024, 800
NEW_TOKENS = (50, 2_000)  # of a turn, log-uniform
NEW_SESSIONS_SHARE, ANSWER_TOKENS, DEADLINE_MS = 0.2, 200, 60_000
EVENT_BLOCKS = 4_096  # hashes in one batch
_TOPICS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.REPLICA: "decode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """Sets how many workers, sessions, blocks and requests a fleet has."""

    workers: int = 200
    sessions: int = 100_000
    blocks: int = 1_000_000
    requests: int = 20_000
    concurrent_requests: int = 1_500


class FleetTraffic:
    """Makes the fleet, session, KV and request records of one run."""

    def __init__(self, size: FleetSize, seed: int, start_ms: int) -> None:
        self.size = size
        self.start_ms = start_ms
        self._random = Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._systems = self._tokens(SYSTEM_PROMPTS * SYSTEM_TOKENS).reshape(SYSTEM_PROMPTS, -1)
        replicas, prefills = size.workers // 20, size.workers * 2 // 5
        decodes = size.workers - replicas - prefills
        self.workers = {f"p{n:03}": Role.PREFILL for n in range(prefills)}
        self.decodes = [f"d{n:03}" for n in range(decodes)]
        self.workers |= dict.fromkeys(self.decodes, Role.DECODE)
        self.workers |= {f"x{n:03}": Role.REPLICA for n in range(replicas)}
        own_blocks = HISTORY_TOKENS // BLOCK
        self.cached = min(size.sessions, max(1, size.blocks // own_blocks))
        self._histories = self._tokens(self.cached * HISTORY_TOKENS).reshape(self.cached, -1)

    def _tokens(self, count: int) -> npt.NDArray[np.int32]:
        return self._numbers.integers(0, 128_000, count, dtype=np.int32)

    def registrations(self) -> Iterator[Registration]:
        """Yield the registration of each worker; every other one supports only `prefill_first`."""
        both = (Orchestration.PREFILL_FIRST, Orchestration.CONCURRENT)
        for number, (worker_id, role) in enumerate(self.workers.items()):
            able = Capability(
                model="model",
                engine="sim",
                engine_id="engine",
                block_size=BLOCK,
                max_model_len=131_072,
                running_max=WINDOW,
                orchestrations=both[: 1 + number % 2],
            )
            yield Registration(
                member_id=worker_id,
                epoch=1,
                kind=MemberKind.WORKER,
                roles=(role,),
                leases=(Lease(topic=_TOPICS[role], partition=number),),
                started_ms=self.start_ms,
                capability=able,
            )

    def heartbeats(self, seq: int, now_ms: int) -> Iterator[Heartbeat]:
        """Yield one heartbeat of each worker."""
        for worker_id, role in self.workers.items():
            yield Heartbeat(
                member_id=worker_id,
                epoch=1,
                seq=seq,
                at_ms=now_ms,
                state=MemberState.READY,
                grants=(Grant(router_id=ROUTER, role=role, credits=WINDOW),),
                load=Load(),
            )

    def sessions(self) -> Iterator[Session]:
        """Yield the sessions, spread evenly over the decode workers."""
        for number in range(self.size.sessions):
            yield Session(
                session_id=f"session-{number:06}",
                decode_worker=self.decodes[number % len(self.decodes)],
                worker_epoch=1,
                context_tokens=SYSTEM_TOKENS + HISTORY_TOKENS,
                turns=1,
                last_used_ms=self.start_ms,
            )

    def kv_events(self) -> Iterator[KvEvents]:
        """Yield snapshots of caches: all workers have the system prompts, decode workers also the
        histories of their sessions."""
        for worker_id in self.workers:
            chains = [chain(system, BLOCK) for system in self._systems]
            if worker_id in self.decodes:
                first, step = self.decodes.index(worker_id), len(self.decodes)
                numbers = range(first, self.cached, step)
                chains += [
                    chain(self._history(n), BLOCK)[SYSTEM_TOKENS // BLOCK :] for n in numbers
                ]
            blocks = np.concatenate(chains)
            parts = range(0, len(blocks), EVENT_BLOCKS)
            for seq, part in enumerate(parts):
                yield KvEvents(
                    worker_id=worker_id,
                    epoch=1,
                    seq=seq,
                    at_ms=self.start_ms,
                    block_size=BLOCK,
                    snapshot=True,
                    has_more=seq < len(parts) - 1,
                    stored=pack(blocks[part : part + EVENT_BLOCKS]),
                )

    def _history(self, number: int) -> npt.NDArray[np.int32]:
        """Return the tokens of a session's system prompt, question and answer. Sessions beyond
        `cached` derive theirs from a cached one, to save memory."""
        history = self._histories[number % self.cached] + number // self.cached
        return np.concatenate([self._systems[number % SYSTEM_PROMPTS], history])

    def request(self, number: int, now_ms: int) -> Request:
        """Return a request: another turn of a random session, or the first turn of a new one."""
        low, high = NEW_TOKENS
        new = self._tokens(int(low * (high / low) ** self._random.random()))
        session_number = self._random.randrange(self.size.sessions)
        if self._random.random() < NEW_SESSIONS_SHARE:
            session_id = f"new-{number:06}"
            prompt = np.concatenate([self._systems[number % SYSTEM_PROMPTS], new])
        else:
            session_id = f"session-{session_number:06}"
            prompt = np.concatenate([self._history(session_number), new])
        return Request(
            request_id=f"request-{number:06}",
            parent_id=f"request-{number:06}",
            session_id=session_id,
            turn=0 if session_id.startswith("new") else 1,
            endpoint=Endpoint.CHAT,
            priority=Priority.STANDARD,
            model="model",
            prompt_tokens=pack_tokens(prompt.tolist()),
            sampling=Sampling(max_tokens=ANSWER_TOKENS),
            arrived_ms=now_ms,
            deadline_ms=now_ms + DEADLINE_MS,
            gateway_id="gateway",
            gateway_partition=0,
        )


def prefill_phase(work: Work, now_ms: int) -> Phase:
    """Return the `PREFILL_DONE` phase of the prefill worker that has this work."""
    kv = KvHandle(
        worker_id=work.worker_id,
        worker_epoch=1,
        engine_id="engine",
        engine_request_id=work.request_id,
        tokens=token_count(work.prompt_tokens),
        block_size=BLOCK,
        expires_at_ms=now_ms + DEADLINE_MS,
    )
    return Phase(
        request_id=work.request_id,
        session_id=work.session_id,
        attempt=work.attempt,
        router_id=ROUTER,
        worker_id=work.worker_id,
        worker_epoch=1,
        kind=PhaseKind.PREFILL_DONE,
        started_ms=work.dispatched_ms,
        ended_ms=now_ms,
        sent_tokens=1,
        kv=kv,
    )


def completed_outcome(work: Work, now_ms: int) -> Outcome:
    """Return the completed outcome of the decode or replica worker that has this work."""
    return Outcome(
        request_id=work.request_id,
        session_id=work.session_id,
        attempt=work.attempt,
        kind=OutcomeKind.COMPLETED,
        finish_reason="length",
        written_by=work.worker_id,
        mode=work.mode,
        prefill_worker=work.prefill_worker,
        decode_worker=work.worker_id,
        prompt_tokens=token_count(work.prompt_tokens),
        completion_tokens=ANSWER_TOKENS,
        first_token_ms=work.dispatched_ms + 50,
        ended_ms=now_ms,
        orchestration=work.orchestration,
    )

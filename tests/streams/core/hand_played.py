"""Members of the fleet that a test plays by hand, and what a worker of them holds by its books.

The router has to bear whatever comes from the log, so these say anything at any time, what no real
worker would too: late, stale, twice, out of turn. Real workers meet the same router in
`infra/simulator`, by the code of `workers/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.records import MemberState, Orchestration, PhaseKind, Role, Work
from tests.streams.builders import T0

Key = tuple[str, int]  # a request's id and the attempt
_GOES_ON = {PhaseKind.KV_ALLOCATED, PhaseKind.KV_RECEIVED, PhaseKind.KV_MISSED}


@dataclass
class HandPlayedWorker:
    """One life of a worker that says what the test has it say, not what `workers/llm` would."""

    worker_id: str
    role: Role
    partition: int
    window: int
    epoch: int = 1
    seq: int = 0
    seen_ms: int = T0
    silent: bool = False
    state: MemberState = MemberState.READY
    can: Sequence[Orchestration] = ()
    model: str = "tiny"
    adapters: Sequence[str] = ()  # that it can load
    loaded: Sequence[str] = ()  # as it reports
    holds: dict[Key, Work] = field(default_factory=dict)
    allocated: set[Key] = field(default_factory=set)
    taken_keys: set[Key] = field(default_factory=set)  # repeated work is ignored

    @property
    def topic(self) -> str:
        return "prefill" if self.role is Role.PREFILL else "decode"

    def take(self, work: Work) -> None:
        """Never more than it granted."""
        key = key_of(work)
        if key not in self.taken_keys:
            self.taken_keys.add(key)
            self.holds[key] = work
            assert len(self.holds) <= self.window, "more work than credits"

    def say(self, work: Work, kind: PhaseKind) -> None:
        """A phase of the work, true or not; unless more follows, it holds the work no longer."""
        if kind is PhaseKind.KV_ALLOCATED:
            self.allocated.add(key_of(work))
        elif kind not in _GOES_ON:
            self.end(work)

    def end(self, work: Work) -> None:
        """It holds the work no longer, if this life did."""
        if self.epoch == work.worker_epoch:
            self.holds.pop(key_of(work), None)


@dataclass
class HandPlayedGateway:
    """One process of a gateway."""

    gateway_id: str
    started_ms: int
    epoch: int
    silent: bool = False
    seq: int = 0


def key_of(work: Work) -> Key:
    """What a worker holds it by."""
    return work.request_id, work.attempt

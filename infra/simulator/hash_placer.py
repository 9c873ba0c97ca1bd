"""A placer that assigns conversations by hash and ignores load, as the PPD authors' proxy does.

Their proxy (github.com/freelulul/vllm-ppd, ppd/src/comprehensive_proxy.py, `select_servers`) hashes
the first user message, and takes the hash modulo the number of replicas and decode workers, and
modulo the number of prefill workers. So a conversation stays on its workers. Some decode workers
compute later turns themselves and the others never do; or the authors' table (their dynamic PPD)
decides this for each turn. Python's hash of a string differs between processes, hence the salt.
This placer hashes the session's id. It is for comparison only.
"""

from hashlib import md5

from schemas.records import Mode, Orchestration, Reason, Role
from streams.config import RouterSettings
from streams.core.fleet.workers import Fleet, Life, Worker
from streams.core.placement.placer import OrchestrationChoice, Placer
from streams.core.placement.policies.policy import Choice
from streams.core.placement.ppd_table import PpdTable
from streams.core.placement.selection import View
from streams.core.requests.live import Placement, RequestCase


class HashPlacer(Placer):
    """Replaces the router's choice of workers; supports the policies `static`, `table` and
    `replica`."""

    def __init__(self, settings: RouterSettings, salt: str, table: PpdTable | None = None) -> None:
        super().__init__(settings, table)
        self._salt = salt.encode()

    def place(self, case: RequestCase, fleet: Fleet, now_ms: int) -> Placement | None:
        """Place a request where its hash points; return None if no such worker is alive."""
        view = self._view(case, fleet, now_ms)
        replicas, decoders = (_live_workers(view, role) for role in (Role.REPLICA, Role.DECODE))
        prefills = _live_workers(view, Role.PREFILL)
        dealt = self._pick(case, replicas + decoders)
        if dealt is None:
            return None
        if dealt.role is Role.REPLICA:
            return self._placement(
                view, Mode.REPLICA, Choice(False, Reason.SESSION_WORKER), None, dealt
            )
        choice = self._choice(view, decoders, dealt)
        if choice.local:
            return self._local(view, dealt, choice)
        prefill = self._pick(case, prefills)
        if prefill is None:
            return None
        way = OrchestrationChoice(Orchestration.PREFILL_FIRST)
        return self._placement(view, Mode.REMOTE, choice, prefill, dealt, way)

    def _choice(self, view: View, decoders: list[Worker], dealt: Worker) -> Choice:
        """Return whether the conversation's decode worker computes the turn itself."""
        if not view.case.request.turn:
            return Choice(False, Reason.FIRST_TURN)
        if self.settings.policy == "table" and view.fleet.has_living(Role.PREFILL, view.now_ms):
            return self._policies["table"].choose(self._turn(view, dealt, dealt))
        is_local = decoders.index(dealt) >= self._first_appender(decoders)
        return Choice(is_local, Reason.FIXED_SHARE)

    def handoff(
        self, case: RequestCase, fleet: Fleet, now_ms: int, *, prefill: Life, decode: Life
    ) -> tuple[Worker | None, Reason]:
        """Return the conversation's decode worker, and the reason."""
        view = self._view(case, fleet, now_ms)
        replicas, decoders = (_live_workers(view, role) for role in (Role.REPLICA, Role.DECODE))
        dealt = self._pick(case, replicas + decoders)
        if dealt not in decoders:  # workers have died since the request was placed
            dealt = self._pick(case, decoders)
        return dealt, Reason.NO_WORKER if dealt is None else Reason.PREFILL_DONE

    def _pick(self, case: RequestCase, workers: list[Worker]) -> Worker | None:
        if not workers:
            return None
        return workers[self._key(case, workers[0].role) % len(workers)]

    def _key(self, case: RequestCase, role: Role) -> int:
        return int.from_bytes(md5(self._salt + case.request.session_id.encode()).digest())

    def _first_appender(self, decoders: list[Worker]) -> int:
        """Return the index of the first decode worker that computes later turns itself."""
        return round(len(decoders) * (1 - self.settings.local_share))


def _live_workers(view: View, role: Role) -> list[Worker]:
    return [worker for worker in view.fleet.pools[role].workers if worker.is_alive(view.now_ms)]

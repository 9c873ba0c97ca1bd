"""The tables of a router: all its data about its partitions and the fleet.

`Router` creates one `RouterTables`, and only the handlers (`streams/core/handlers`) and `Router`
change it. Decides nothing. `effects` has the effects of the current event so far.
"""

from streams.config import RouterSettings
from streams.core.effects import Effect
from streams.core.fleet.members import Fleet
from streams.core.requests.admission import Admission
from streams.core.requests.context import SessionHistories
from streams.core.requests.demand import Demand
from streams.core.requests.ended_ids import EarlyCancellations, EndedIds
from streams.core.requests.live import LiveRequest, LiveRequests
from streams.core.requests.sessions import Sessions


class RouterTables:
    """All tables of one router, one of each kind."""

    def __init__(self, router_id: str, settings: RouterSettings) -> None:
        self.router_id = router_id
        self.settings = settings
        self.fleet = Fleet(router_id)
        self.requests = LiveRequests()
        self.ended_ids = EndedIds(settings.ended_max)
        self.early_cancellations = EarlyCancellations()
        self.sessions = Sessions(sessions_max=settings.sessions_max, ttl_ms=settings.session_ttl_ms)
        self.histories = SessionHistories(
            sessions_max=settings.histories_max, bytes_max=settings.histories_bytes_max
        )
        self.admission = Admission(
            requests_max=settings.queue_requests_max,
            tokens_max=settings.queue_tokens_max,
        )
        self.demand = Demand()
        self.effects: list[Effect] = []
        self.failed_over: LiveRequest | None = None

    def about(self, live: LiveRequest) -> "_BlameScope":
        """Return a context that blames this request for an exception raised within it. Of nested
        contexts, the innermost one counts."""
        return _BlameScope(self, live)

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects = self.effects[:]
        self.effects.clear()
        return effects

    def forget_partition(self, partition: int) -> None:
        """Drop all entries of a partition except its live requests."""
        self.sessions.drop(partition)
        self.histories.drop(partition)
        self.ended_ids.forget_partition(partition)
        self.early_cancellations.forget_partition(partition)

    def sweep(self, now_ms: int) -> None:
        """Drop ended ids and early cancellations that are too old."""
        self.ended_ids.sweep(now_ms)
        self.early_cancellations.sweep(now_ms)


class _BlameScope:
    """A context that notes its request as `failed_over` if its body raises."""

    __slots__ = ("_live", "_tables")

    def __init__(self, tables: RouterTables, live: LiveRequest) -> None:
        self._tables, self._live = tables, live

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and self._tables.failed_over is None:
            self._tables.failed_over = self._live

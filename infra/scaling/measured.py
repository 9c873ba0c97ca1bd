"""What the fleet says, as the law wants it: one backlog of all routers, and each pool's state.

Heartbeats tell what is under way at a moment; of that, means over the last seconds are kept here.
Pure: time is an argument.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from infra.scaling.means import Means
from infra.scaling.pools import Pool, mean
from infra.scaling.searches import Searches
from schemas.fleet import FleetView, Member
from schemas.records import Backlog, MemberKind, MemberState, Role

TREND_MS = 60_000.0
LLM = (Role.PREFILL, Role.DECODE, Role.REPLICA)
_MEANS = ("prompt_tokens", "answer_tokens", "prefill_ms", "append_ms", "step_ms", "sharing_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One look at the fleet."""

    backlog: Backlog
    pools: dict[Role, Pool]
    shards: tuple[Pool, ...] = ()  # of the retrieval pool
    growth_per_s2: float = 0.0  # of what comes, in requests per second and second


class Measuring:
    """Looks at the fleet again and again."""

    def __init__(self) -> None:
        self._held = Means[Role]()
        self._searches = Searches()
        self._rates = Means[str](TREND_MS)
        self._looked_ms = 0

    def look(self, view: FleetView, now_ms: int) -> Measured | None:
        """As of now; None where no router lives that says what waits."""
        routers = view.living(MemberKind.ROUTER, now_ms)
        backlogs = [router.backlog for router in routers if router.backlog is not None]
        if not backlogs:
            return None
        workers = [
            worker
            for worker in view.living(MemberKind.WORKER, now_ms)
            if worker.state is MemberState.READY
        ]
        passed_ms, self._looked_ms = now_ms - self._looked_ms, now_ms
        pools = {role: self._pool(_of(workers, role), role, passed_ms) for role in LLM}
        shards = self._searches.look(_of(workers, Role.RETRIEVAL), passed_ms)
        backlog = together(backlogs)
        growth = self._growth(backlog.requests_per_s, passed_ms)
        return Measured(backlog=backlog, pools=pools, shards=shards, growth_per_s2=growth)

    def _growth(self, rate: float, passed_ms: int) -> float:
        """Where a rate grows evenly, its mean lags behind it by what it grows in `TREND_MS`."""
        return (rate - self._rates.seen("requests", rate, passed_ms)) * 1_000 / TREND_MS

    def _pool(self, workers: Sequence[Member], role: Role, passed_ms: int) -> Pool:
        held = sum(worker.load.running + worker.load.waiting for worker in workers)
        slots = [sum(n for (_, r), n in worker.credits.items() if r is role) for worker in workers]
        return Pool(
            present=len(workers),
            under_way=self._held.seen(role, held, passed_ms),
            slots=mean(slots),
            kv_tokens=mean(map(_kv_tokens, workers)),
        )


def together(backlogs: Sequence[Backlog]) -> Backlog:
    """What waits at several routers, as if it were one; means by how much comes to each."""
    if len(backlogs) == 1:
        return backlogs[0]
    rate = sum(each.requests_per_s for each in backlogs)
    shares = [each.requests_per_s / rate if rate else 1 / len(backlogs) for each in backlogs]
    means = {
        name: sum(share * getattr(b, name) for share, b in zip(shares, backlogs, strict=True))
        for name in _MEANS
    }
    waiting = [each for each in backlogs if each.waiting]
    return replace(
        Backlog(**means),
        waiting=sum(each.waiting for each in backlogs),
        oldest_ms=max(each.oldest_ms for each in backlogs),
        slack_ms=min((each.slack_ms for each in waiting), default=0),
        handing_over=sum(each.handing_over for each in backlogs),
        retrieving=sum(each.retrieving for each in backlogs),
        requests_per_s=rate,
    )


def _of(workers: Iterable[Member], role: Role) -> list[Member]:
    return [worker for worker in workers if role in worker.registration.roles]


def _kv_tokens(worker: Member) -> float:
    capability = worker.registration.capability
    return 0.0 if capability is None else capability.block_size * worker.load.kv_blocks_total

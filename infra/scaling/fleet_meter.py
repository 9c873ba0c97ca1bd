"""Measures the fleet for the scaling policy: one backlog of all routers, and each pool's load.

Heartbeats report the load at a moment; this module keeps its means over the last seconds. Pure:
time is an argument. Called by `scaler.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from infra.scaling.ewma import Ewma
from infra.scaling.pools import PoolLoad, mean
from infra.scaling.searches import RetrievalMeter
from schemas.fleet import FleetView, Member
from schemas.records import Backlog, MemberKind, MemberState, Role

TREND_MS = 60_000.0
LLM = (Role.PREFILL, Role.DECODE, Role.REPLICA)
_MEANS = ("prompt_tokens", "answer_tokens", "prefill_ms", "append_ms", "step_ms", "sharing_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMeasurement:
    """Backlog and pools of the fleet at one moment."""

    backlog: Backlog
    pools: dict[Role, PoolLoad]
    shards: tuple[PoolLoad, ...] = ()  # of the retrieval pool
    growth_per_s2: float = 0.0  # of the arrival rate, in requests/s per second


class FleetMeter:
    """Measures the fleet's backlog and pools, one call after the other."""

    def __init__(self) -> None:
        self._under_way = Ewma[Role]()
        self._retrieval = RetrievalMeter()
        self._rates = Ewma[str](TREND_MS)
        self._measured_ms = 0

    def measure(self, view: FleetView, now_ms: int) -> FleetMeasurement | None:
        """Measure the fleet now; return None if no live router reports a backlog."""
        routers = view.living(MemberKind.ROUTER, now_ms)
        backlogs = [backlog for router in routers for backlog in router.backlogs]
        if not backlogs:
            return None
        workers = [
            worker
            for worker in view.living(MemberKind.WORKER, now_ms)
            if worker.state is MemberState.READY
        ]
        passed_ms, self._measured_ms = now_ms - self._measured_ms, now_ms
        pools = {role: self._pool(_of(workers, role), role, passed_ms) for role in LLM}
        shards = self._retrieval.measure(_of(workers, Role.RETRIEVAL), passed_ms)
        backlog = merge_backlogs(backlogs)
        growth = self._growth(backlog.requests_per_s, passed_ms)
        return FleetMeasurement(backlog=backlog, pools=pools, shards=shards, growth_per_s2=growth)

    def _growth(self, rate: float, passed_ms: int) -> float:
        """Return the growth of a rate, per second. The mean of a rate that grows evenly lags behind
        it by its growth in `TREND_MS`."""
        return (rate - self._rates.update("requests", rate, passed_ms)) * 1_000 / TREND_MS

    def _pool(self, workers: Sequence[Member], role: Role, passed_ms: int) -> PoolLoad:
        under_way = sum(worker.load.running + worker.load.waiting for worker in workers)
        slots = [sum(n for (_, r), n in worker.credits.items() if r is role) for worker in workers]
        return PoolLoad(
            present=len(workers),
            under_way=self._under_way.update(role, under_way, passed_ms),
            slots=mean(slots),
            kv_tokens=mean(map(_kv_tokens, workers)),
        )


def merge_backlogs(backlogs: Sequence[Backlog]) -> Backlog:
    """Merge the backlogs of several routers into one; means are weighted by arrival rate."""
    if len(backlogs) == 1:
        return backlogs[0]
    rate = sum(backlog.requests_per_s for backlog in backlogs)
    shares = [backlog.requests_per_s / rate if rate else 1 / len(backlogs) for backlog in backlogs]
    means = {
        name: sum(share * getattr(b, name) for share, b in zip(shares, backlogs, strict=True))
        for name in _MEANS
    }
    waiting = [backlog for backlog in backlogs if backlog.waiting]
    return replace(
        Backlog(**means),
        waiting=sum(backlog.waiting for backlog in backlogs),
        oldest_ms=max(backlog.oldest_ms for backlog in backlogs),
        slack_ms=min((backlog.slack_ms for backlog in waiting), default=0),
        handing_over=sum(backlog.handing_over for backlog in backlogs),
        retrieving=sum(backlog.retrieving for backlog in backlogs),
        requests_per_s=rate,
    )


def _of(workers: Iterable[Member], role: Role) -> list[Member]:
    return [worker for worker in workers if role in worker.registration.roles]


def _kv_tokens(worker: Member) -> float:
    capability = worker.registration.capability
    return 0.0 if capability is None else capability.block_size * worker.load.kv_blocks_total

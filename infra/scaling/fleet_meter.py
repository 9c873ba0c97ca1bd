"""Measures the fleet for the scaling policy: for each model, one backlog of all routers and each
pool's load.

Heartbeats report the load at a moment; this module keeps its means over the last seconds. Pure:
time is an argument. Called by `scaler.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from infra.scaling.ewma import Ewma
from infra.scaling.pools import LLM, PoolKey, PoolLoad, mean
from infra.scaling.searches import RetrievalMeter
from schemas.fleet import FleetView, Member
from schemas.records import Backlog, MemberKind, MemberState, Role

TREND_MS = 60_000.0
_MEANS = ("prompt_tokens", "answer_tokens", "prefill_ms", "append_ms", "step_ms", "sharing_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMeasurement:
    """Backlog and pools of one model at one moment."""

    backlog: Backlog  # it names the model
    pools: dict[Role, PoolLoad]
    growth_per_s2: float = 0.0  # of the arrival rate, in requests/s per second


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMeasurement:
    """All models and searches at one moment."""

    models: tuple[ModelMeasurement, ...]  # in order of their names
    shards: tuple[PoolLoad, ...] = ()  # of the retrieval pool


class FleetMeter:
    """Measures the fleet's backlogs and pools, one call after the other."""

    def __init__(self) -> None:
        self._under_way = Ewma[PoolKey]()
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
        models = tuple(
            self._model(backlog, [w for w in workers if _model_of(w) == backlog.model], passed_ms)
            for backlog in _by_model(backlogs, {_model_of(w) for w in workers})
        )
        shards = self._retrieval.measure(_of(workers, Role.RETRIEVAL), passed_ms)
        return FleetMeasurement(models=models, shards=shards)

    def _model(
        self, backlog: Backlog, workers: Sequence[Member], passed_ms: int
    ) -> ModelMeasurement:
        pools = {
            role: self._pool(_of(workers, role), PoolKey(role, backlog.model), passed_ms)
            for role in LLM
        }
        growth = self._growth(backlog, passed_ms)
        return ModelMeasurement(backlog=backlog, pools=pools, growth_per_s2=growth)

    def _growth(self, backlog: Backlog, passed_ms: int) -> float:
        """Return the growth of a rate, per second. The mean of a rate that grows evenly lags behind
        it by its growth in `TREND_MS`."""
        rate = backlog.requests_per_s
        return (rate - self._rates.update(backlog.model, rate, passed_ms)) * 1_000 / TREND_MS

    def _pool(self, workers: Sequence[Member], key: PoolKey, passed_ms: int) -> PoolLoad:
        under_way = sum(worker.load.running + worker.load.waiting for worker in workers)
        slots = [
            sum(n for (_, role), n in worker.credits.items() if role is key.role)
            for worker in workers
        ]
        return PoolLoad(
            present=len(workers),
            under_way=self._under_way.update(key, under_way, passed_ms),
            slots=mean(slots),
            kv_tokens=mean(map(_kv_tokens, workers)),
        )


def _by_model(backlogs: Sequence[Backlog], models: set[str]) -> Iterator[Backlog]:
    """Yield the backlog of each model that has workers or a backlog, merged over all routers.

    A backlog that names no model is the one of the only model.
    """
    names = sorted((models | {backlog.model for backlog in backlogs}) - {""}) or [""]
    for name in names:
        its_names = (name, "") if len(names) == 1 else (name,)
        its_backlogs = [backlog for backlog in backlogs if backlog.model in its_names]
        yield replace(merge_backlogs(its_backlogs or [Backlog()]), model=name)


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


def _model_of(worker: Member) -> str:
    """Return the model of a worker, or an empty text for a worker of another kind."""
    capability = worker.registration.capability
    return "" if capability is None else capability.model


def _kv_tokens(worker: Member) -> float:
    capability = worker.registration.capability
    return 0.0 if capability is None else capability.block_size * worker.load.kv_blocks_total

"""What each simulated worker serves: one model, or one of two, the first with adapters.

With two models, workers of each kind are dealt to them in turn. Each worker has some adapters of
the first model. A worker that a fault restarts may come back with the other model, so a model may
have no worker for a while.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from infra.simulator.shape import ClusterShape
from schemas.records import Role

MODEL = "simulated"
SECOND_MODEL = "second"
ADAPTERS = ("law", "tax")  # over MODEL
NAMES = ((MODEL, ""), (SECOND_MODEL, ""), *((MODEL, adapter) for adapter in ADAPTERS))
SHARES = (0.3, 0.35, 0.2, 0.15)  # of conversations, by name
ADAPTER_SHARE = 0.6  # share of workers that can load an adapter
MOVE_SHARE = 0.4  # share of restarts after which a worker has the other model
_ENDS = {Role.DECODE, Role.REPLICA}  # a worker with one of these roles can answer alone
_STREAM = 31  # of the seed's random numbers


def models_draw(seed: int, *parts: int) -> np.random.Generator:
    """Return the generator of one part of what two models add to a seed."""
    return np.random.default_rng([seed, _STREAM, *parts])


def answer_name(request_id: str, model: str, adapter: str) -> str:
    """Return the name from which all tokens of an answer follow; it has the model and adapter."""
    is_plain = model in ("", MODEL) and not adapter
    return request_id if is_plain else f"{request_id}@{model}+{adapter}"


def scope_of(cache_scope: str, adapter: str) -> str:
    """Return the cache scope of a call with the adapter, as a gateway makes it."""
    return f"{cache_scope}+{adapter}" if adapter else cache_scope


@dataclass(frozen=True, slots=True)
class Served:
    """What one process of a worker serves."""

    model: str = MODEL
    adapters: tuple[str, ...] = ()  # that it can load
    adapters_max: int = 0  # that it has loaded at a time

    def answers(self, model: str, adapter: str) -> bool:
        """Return whether it serves the model and can load the adapter, if there is one."""
        return self.model == model and adapter in ("", *self.adapters)


class OneModel:
    """The same model on all workers."""

    def first(self, worker_id: str) -> Served:
        """Return what a worker's first process serves."""
        return Served()

    def following(self, worker_id: str, epoch: int, before: Served) -> Served:
        """Return what a worker serves that a fault restarts after that epoch."""
        return before

    def settle(self, present: Mapping[str, Served]) -> Mapping[str, Served]:
        """End all changes of models; return what workers have to change to, if every name of
        a model or adapter shall have a worker that can answer."""
        return {}


class TwoModels(OneModel):
    """Two models on the workers of a shape, drawn from a seed."""

    def __init__(self, shape: ClusterShape, seed: int) -> None:
        draw, self._seed, self._is_settled = models_draw(seed, 1), seed, False
        self._roles = dict(shape.roles())
        self._adapters: dict[str, tuple[str, ...]] = {}
        for worker_id in self._roles:
            loads = draw.random(len(ADAPTERS)) < ADAPTER_SHARE
            self._adapters[worker_id] = tuple(
                name for name, can in zip(ADAPTERS, loads, strict=True) if can
            )
        self._places = int(draw.integers(1, len(ADAPTERS) + 1))  # for adapters, on each worker
        self._firsts = {
            worker_id: (MODEL, SECOND_MODEL)[_turn(worker_id) % 2] for worker_id in self._roles
        }
        whole = next(
            name
            for name, model in self._firsts.items()
            if model == MODEL and _ENDS.intersection(self._roles[name])
        )
        self._adapters[whole] = ADAPTERS
        assert self._all_answer({name: self.first(name) for name in self._roles}), shape.name

    def first(self, worker_id: str) -> Served:
        """Return what a worker's first process serves."""
        return self._of(worker_id, self._firsts.get(worker_id, MODEL))

    def _of(self, worker_id: str, model: str) -> Served:
        adapters = self._adapters.get(worker_id, ()) if model == MODEL else ()
        return Served(model, adapters, self._places if adapters else 0)

    def following(self, worker_id: str, epoch: int, before: Served) -> Served:
        """Return what a worker serves that a fault restarts after that epoch."""
        draw = models_draw(self._seed, crc32(worker_id.encode()), epoch)
        if self._is_settled or draw.random() >= MOVE_SHARE:
            return before
        return self._of(worker_id, MODEL if before.model == SECOND_MODEL else SECOND_MODEL)

    def settle(self, present: Mapping[str, Served]) -> Mapping[str, Served]:
        """End all changes of models; return what workers have to change to, if every name of
        a model or adapter shall have a worker that can answer."""
        self._is_settled = True
        if self._all_answer(present):
            return {}
        firsts = {name: self.first(name) for name in self._roles}
        return {name: served for name, served in firsts.items() if present[name] != served}

    def _all_answer(self, present: Mapping[str, Served]) -> bool:
        enders: Collection[Served] = [
            present[name] for name, roles in self._roles.items() if _ENDS.intersection(roles)
        ]
        return all(any(served.answers(*name) for served in enders) for name in NAMES)


def _turn(worker_id: str) -> int:
    """Return a worker's number among its kind; workers of both roles begin with the second model,
    so that three prefill and decode workers and one of both roles serve two models."""
    kind, _, number = worker_id.rpartition("-")
    return int(number) + (kind == "both")

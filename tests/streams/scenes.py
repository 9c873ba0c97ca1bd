"""Ready-made clusters and the usual first steps of a request on them."""

from typing import Any

from schemas.records import PhaseKind, Role, Work
from streams.core.requests import State
from tests.streams.cluster import Cluster


def split(prefills: int = 1, decodes: int = 1, **settings: Any) -> Cluster:
    on = Cluster(**settings)
    for number in range(prefills):
        on.worker(f"p{number}", Role.PREFILL, window=4)
    for number in range(decodes):
        on.worker(f"d{number}", Role.DECODE, window=4)
    on.pass_ms(250)
    return on


def replicas(count: int = 1, window: int = 4, **settings: Any) -> Cluster:
    on = Cluster(**settings)
    for number in range(count):
        on.worker(f"x{number}", Role.REPLICA, window=window)
    on.pass_ms(250)
    return on


def to_decoding(on: Cluster, request_id: str = "r1", **changes: Any) -> Work:
    """A remote request up to its decode worker; returns its work there."""
    on.request(request_id, **changes)
    on.phase(on.works[-1], PhaseKind.PREFILL_DONE)
    return on.works[-1]


def state_of(on: Cluster, request_id: str) -> State:
    return on.router.dispatcher.table.live[request_id].state

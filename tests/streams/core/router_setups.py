"""Ready-made fleets and the usual first steps of a request on them."""

from typing import Any

from schemas.records import Orchestration, PhaseKind, Role, Work, WorkPhase
from streams.core.states import State
from tests.streams.builders import ALL
from tests.streams.core.router_harness import RouterHarness


def split(prefills: int = 1, decodes: int = 1, **settings: Any) -> RouterHarness:
    on = RouterHarness(**settings)
    for number in range(prefills):
        on.worker(f"p{number}", Role.PREFILL, window=4)
    for number in range(decodes):
        on.worker(f"d{number}", Role.DECODE, window=4)
    on.pass_ms(250)
    return on


def replicas(count: int = 1, window: int = 4, **settings: Any) -> RouterHarness:
    on = RouterHarness(**settings)
    for number in range(count):
        on.worker(f"x{number}", Role.REPLICA, window=window)
    on.pass_ms(250)
    return on


def to_decoding(on: RouterHarness, request_id: str = "r1", **changes: Any) -> Work:
    """A remote request up to its decode worker; returns its work there."""
    on.request(request_id, **changes)
    on.phase(on.works[-1], PhaseKind.PREFILL_DONE)
    return on.works[-1]


def state_of(on: RouterHarness, request_id: str) -> State:
    return on.router.tables.requests.by_id[request_id].state


def pairs(
    orchestration: Orchestration, prefills: int = 1, decodes: int = 1, **kw: Any
) -> RouterHarness:
    """Workers whose engines can do everything, and a router that wants one orchestration."""
    on = RouterHarness(orchestration=orchestration.value, **kw)
    for number in range(prefills):
        on.worker(f"p{number}", Role.PREFILL, window=4, can=ALL)
    for number in range(decodes):
        on.worker(f"d{number}", Role.DECODE, window=4, can=ALL)
    on.pass_ms(250)
    return on


def work_of(on: RouterHarness, phase: WorkPhase, request_id: str = "r1") -> Work:
    """The last work of a phase of a request."""
    return next(w for w in reversed(on.works) if (w.request_id, w.phase) == (request_id, phase))


def brought_to(on: RouterHarness, stage: str, request_id: str = "r1", **changes: Any) -> None:
    """A request up to a state, by its name."""
    on.request(request_id, **changes)
    state = state_of(on, request_id)
    if state is State.ALLOCATING and stage != "allocating":
        on.phase(work_of(on, WorkPhase.DECODE, request_id), PhaseKind.KV_ALLOCATED)
    if stage == "received":
        on.phase(work_of(on, WorkPhase.DECODE, request_id), PhaseKind.KV_RECEIVED)
    if stage in ("decoding", "handing_over"):
        on.phase(work_of(on, WorkPhase.PREFILL, request_id), PhaseKind.PREFILL_DONE)
    assert state_of(on, request_id).value == stage


def running(on: RouterHarness) -> dict[str, int]:
    """Credits spent, by worker."""
    pools = on.router.tables.fleet.of("tiny").pools.values()
    return {worker.worker_id: worker.running for pool in pools for worker in pool.workers}

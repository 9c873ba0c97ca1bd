"""Builds the phase of a piece of work: its worker's report, or one in its place.

Called by workers, by routers for work that could not be sent, and by the simulator.
"""

from typing import Any

from schemas.records import Phase, PhaseKind, Work


def phase_of(work: Work, kind: PhaseKind, started_ms: int, ended_ms: int, **fields: Any) -> Phase:
    """Return a phase of the worker that has the work; `fields` are further fields of Phase."""
    return Phase(
        request_id=work.request_id,
        session_id=work.session_id,
        attempt=work.attempt,
        router_id=work.router_id,
        worker_id=work.worker_id,
        worker_epoch=work.worker_epoch,
        kind=kind,
        started_ms=started_ms,
        ended_ms=ended_ms,
        **fields,
    )

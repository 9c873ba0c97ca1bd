"""The phase of a piece of work is its worker's, whoever writes it."""

from dataclasses import replace

from schemas.records import PhaseKind, WorkPhase
from schemas.rules.phases import phase_of
from streams.agents.records import unsent_phase
from streams.core.effects import Dispatch
from tests.schemas.examples import example


def test_whoever_speaks_of_work_names_its_life_and_attempt() -> None:
    order = replace(
        example("trivium.Work"),
        phase=WorkPhase.PREFILL,
        attempt=3,
        worker_epoch=7,
        router_id="router-b",
    )
    found = phase_of(order, PhaseKind.PREFILL_DONE, 5, 9, sent_tokens=1)
    named = (found.request_id, found.session_id, found.attempt, found.router_id)
    assert named == (order.request_id, order.session_id, 3, "router-b")
    assert (found.worker_id, found.worker_epoch) == (order.worker_id, 7)
    assert (found.started_ms, found.ended_ms, found.sent_tokens) == (5, 9, 1)
    unsent = unsent_phase(Dispatch("prefill", 0, order), ValueError("no room"), 9)
    assert unsent is not None and unsent.error is not None
    assert replace(unsent, error=None) == phase_of(order, PhaseKind.FAILED, 9, 9)

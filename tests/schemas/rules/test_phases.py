"""The phase of a piece of work is its worker's, whoever writes it."""

from dataclasses import replace

from schemas.records import PhaseKind, WorkPhase
from schemas.rules.phases import phase_of
from streams.agents.outbox import unsent_phase
from streams.core.effects import Dispatch
from tests.schemas.examples import example


def test_phase_names_attempt_and_epoch_of_its_work() -> None:
    order = replace(
        example("trivium.Work"),
        phase=WorkPhase.PREFILL,
        attempt=3,
        worker_epoch=7,
        router_id="router-b",
    )
    phase = phase_of(order, PhaseKind.PREFILL_DONE, 5, 9, sent_tokens=1)
    identity = (phase.request_id, phase.session_id, phase.attempt, phase.router_id)
    assert identity == (order.request_id, order.session_id, 3, "router-b")
    assert (phase.worker_id, phase.worker_epoch) == (order.worker_id, 7)
    assert (phase.started_ms, phase.ended_ms, phase.sent_tokens) == (5, 9, 1)
    unsent = unsent_phase(Dispatch("prefill", 0, order), ValueError("no room"), 9)
    assert unsent is not None and unsent.error is not None
    assert replace(unsent, error=None) == phase_of(order, PhaseKind.FAILED, 9, 9)

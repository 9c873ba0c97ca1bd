"""What `trivium explain` says of scores that did not decide."""

from dataclasses import replace
from typing import Any

import pytest

from infra.story.steps import steps_of
from infra.story.story import build_stories
from schemas.records import Estimate, Mode, Reason
from tests.schemas.examples import example
from tests.streams.builders import request


@pytest.mark.parametrize(
    ("changes", "score", "rule"),
    [
        ({"reason": Reason.LEARNED}, -0.2, None),
        ({"reason": Reason.LEARNED, "mode": Mode.LOCAL}, 0.2, None),
        ({"reason": Reason.FIRST_TURN, "policy_reason": Reason.LEARNED}, -0.2, None),
        (
            {"reason": Reason.FIRST_TURN, "policy_reason": Reason.TOO_LITTLE_KNOWN},
            0.205,
            "too little is known, and no worker holds its history, so it is remote",
        ),
        ({"reason": Reason.TOO_LITTLE_KNOWN}, -0.2, "its length and the prefill queue decide"),
        ({"reason": Reason.EXPLORING}, 0.2, "what is seldom chosen was tried"),
        ({"reason": Reason.LEARNED, "mode": Mode.LOCAL}, -0.1, "this worker alone does"),
        ({"reason": Reason.LEARNED}, 0.1, "too late for the deadline"),
        (
            {"reason": Reason.SESSION_WORKER_FULL, "policy_reason": Reason.LEARNED},
            0.1,
            "session worker full, so it runs where there is room",
        ),
        ({"reason": Reason.FIRST_TURN}, 0.1, None),  # written before that was told
    ],
)
def test_decision_step_names_rule_that_overruled_score(
    changes: dict[str, Any], score: float, rule: str | None
) -> None:
    estimate = Estimate(score=score, samples=0)
    fields = {"request_id": "r1", "mode": Mode.REMOTE, "policy_reason": Reason.UNKNOWN, **changes}
    placed = replace(example("trivium.Decision"), estimate=estimate, **fields)
    (step,) = (
        s for s in steps_of(build_stories([request("r1")], [placed])["r1"]) if s.kind == "decision"
    )
    notes = [detail for detail in step.details if "the score was not used: " in detail]
    assert len(notes) == (rule is not None)
    assert rule is None or rule in notes[0]

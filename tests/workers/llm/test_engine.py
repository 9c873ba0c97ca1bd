"""The protocol's own rules, without an engine."""

from typing import Any

import pytest

from tests.workers.llm.engines import job

END, STOP = 7, 8


@pytest.mark.parametrize(
    ("answer_tokens", "fields", "expected"),
    [
        ([END], {}, ("stop", "")),
        ([5, END], {"stop_token_ids": (END,)}, ("stop", "")),
        ([STOP], {"stop_token_ids": (STOP,)}, ("stop", "8")),
        ([END], {"stop_token_ids": (END,), "ignore_eos": True}, ("stop", "7")),
        ([END], {"ignore_eos": True}, None),
        ([5, END], {"min_tokens": 2}, None),
        ([5, 6, END], {"min_tokens": 2}, ("stop", "")),
        ([END, 5], {}, None),
        ([STOP], {}, None),
        ([], {}, None),
    ],
)
def test_job_ends_early_if_prior_tokens_end_answer(
    answer_tokens: list[int], fields: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    resumed_job = job(
        [1, END, *answer_tokens], prior_tokens=len(answer_tokens), **{"ignore_eos": False, **fields}
    )
    output = resumed_job.early_end({END})
    assert (output and (output.finish_reason, output.stop_reason)) == expected
    if output is not None:
        assert output.request_id == resumed_job.request_id and not output.token_ids

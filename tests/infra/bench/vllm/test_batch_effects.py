"""Attempts of one request beside each other, without an engine."""

from infra.bench.vllm.batch_effects import compare


def test_answers_differ_from_their_first_other_token_on() -> None:
    alone = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    again = [[1, 2, 3], [4, 0, 6], [7, 8, 0]]
    assert compare(alone, again) == {
        "answers": 3,
        "different": 2,
        "first_difference": [1, 2],
    }

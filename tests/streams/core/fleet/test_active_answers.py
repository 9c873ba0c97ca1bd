"""Answers as columns: the same as a dictionary would hold."""

from hypothesis import given
from hypothesis import strategies as st

from streams.core.fleet.workers import ActiveAnswer, ActiveAnswers


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=120))
def test_active_answers_columns_match_dictionary(steps: list[tuple[bool, int]]) -> None:
    answers, expected = ActiveAnswers(), dict[str, ActiveAnswer]()
    for number, (comes, which) in enumerate(steps):
        name = str(which)
        if comes and name not in expected:
            expected[name] = ActiveAnswer(name, 1, number, 1_000 + number, 2_000 + number)
            answers.add(expected[name])
        elif not comes:
            assert answers.remove(name) == expected.pop(name, None)
    rows = zip(answers.max_tokens, answers.deadline_ms, answers.begins_ms, strict=True)
    assert len(answers) == len(expected)
    assert sorted(rows) == sorted(answer[2:] for answer in expected.values())

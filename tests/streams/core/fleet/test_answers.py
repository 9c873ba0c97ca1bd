"""Answers as columns: the same as a dictionary would hold."""

from hypothesis import given
from hypothesis import strategies as st

from streams.core.fleet.workers import ActiveAnswer, ActiveAnswers


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=120))
def test_columns_tell_of_those_that_are_held(steps: list[tuple[bool, int]]) -> None:
    answers, held = ActiveAnswers(), dict[str, ActiveAnswer]()
    for number, (comes, which) in enumerate(steps):
        name = str(which)
        if comes and name not in held:
            held[name] = ActiveAnswer(name, 1, number, 1_000 + number, 2_000 + number)
            answers.add(held[name])
        elif not comes:
            assert answers.remove(name) == held.pop(name, None)
    rows = zip(answers.max_tokens, answers.deadline_ms, answers.begins_ms, strict=True)
    assert len(answers) == len(held)
    assert sorted(rows) == sorted(each[2:] for each in held.values())

"""The handbook: drawn from a seed, and with answers that only it knows."""

import pytest

from infra.handbook.handbook import Page, handbook, questions


def test_the_same_seed_draws_the_same_pages_and_a_larger_one_begins_with_them() -> None:
    assert handbook(30) == handbook(300)[:30]
    assert handbook(30, seed=8) != handbook(30)


@pytest.mark.parametrize("count", [30, 3_000])
def test_every_thing_has_a_name_of_its_own(count: int) -> None:
    pages = handbook(count)
    assert len({page.document_id for page in pages}) == len({page.title for page in pages}) == count


def test_a_page_tells_the_answer_to_each_of_its_questions() -> None:
    for page in handbook(60):
        for question in (*page.questions, *page.paraphrased):
            assert question.value in page.text
            assert question.document_id == page.document_id


def test_no_question_tells_its_answer() -> None:
    for page in handbook(600):
        for question in (*page.questions, *page.paraphrased):
            assert not question.is_right(question.text)


def test_a_third_of_the_questions_is_in_other_words() -> None:
    asked = questions(handbook(300), 300)
    assert sum(question.is_paraphrased for question in asked) == 100
    assert asked == questions(handbook(300), 300)


def a_page(noun: str) -> Page:
    return next(page for page in handbook(60) if page.document_id.startswith(noun))


def test_an_answer_is_right_with_the_value_as_a_word_of_its_own() -> None:
    question = a_page("ferry").questions[0]
    assert question.is_right(f"It leaves from pier {question.value}.")
    assert not question.is_right(f"It leaves from pier {question.value}9.")
    assert not question.is_right("I do not know.")


def test_an_answer_that_names_all_possible_words_is_not_right() -> None:
    question = a_page("museum").questions[0]
    assert question.is_right(f"On {question.value.upper()}")
    assert not question.is_right(" ".join((question.value, *question.wrong_values)))


def test_more_pages_than_names_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at most"):
        handbook(1_000_000)

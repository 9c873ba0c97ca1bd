"""The handbook: drawn from a seed, and with answers that only it knows."""

import pytest

from infra.handbook.handbook import Page, handbook, questions


def test_handbook_is_reproducible_by_seed_and_prefix_stable() -> None:
    assert handbook(30) == handbook(300)[:30]
    assert handbook(30, seed=8) != handbook(30)


@pytest.mark.parametrize("count", [30, 3_000])
def test_handbook_titles_and_ids_are_unique(count: int) -> None:
    pages = handbook(count)
    assert len({page.document_id for page in pages}) == len({page.title for page in pages}) == count


def test_handbook_page_answers_its_questions() -> None:
    for page in handbook(60):
        for question in (*page.questions, *page.paraphrased):
            assert question.value in page.text
            assert question.document_id == page.document_id


def test_handbook_question_does_not_contain_answer() -> None:
    for page in handbook(600):
        for question in (*page.questions, *page.paraphrased):
            assert not question.is_right(question.text)


def test_handbook_third_of_questions_is_paraphrased() -> None:
    sample = questions(handbook(300), 300)
    assert sum(question.is_paraphrased for question in sample) == 100
    assert sample == questions(handbook(300), 300)


def a_page(noun: str) -> Page:
    return next(page for page in handbook(60) if page.document_id.startswith(noun))


def test_answer_check_matches_value_as_whole_word() -> None:
    question = a_page("ferry").questions[0]
    assert question.is_right(f"It leaves from pier {question.value}.")
    assert not question.is_right(f"It leaves from pier {question.value}9.")
    assert not question.is_right("I do not know.")


def test_answer_check_rejects_answer_with_wrong_values() -> None:
    question = a_page("museum").questions[0]
    assert question.is_right(f"On {question.value.upper()}")
    assert not question.is_right(" ".join((question.value, *question.wrong_values)))


def test_handbook_rejects_more_pages_than_names() -> None:
    with pytest.raises(ValueError, match="expected at most"):
        handbook(1_000_000)

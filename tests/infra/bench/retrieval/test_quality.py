"""The retrieval benchmark's figures of answers."""

from infra.bench.retrieval.quality import JudgedAnswer, figures
from infra.handbook.handbook import handbook


def test_shares_are_of_all_and_of_those_in_other_words() -> None:
    (page,) = handbook(1)
    plain, other = page.questions[0], page.paraphrased[0]
    found = figures(
        [
            JudgedAnswer(plain, is_right=True, is_cited=True, tokens=30),
            JudgedAnswer(plain, is_right=True, is_cited=False, tokens=10),
            JudgedAnswer(other, is_right=False, is_cited=True, tokens=20),
            JudgedAnswer(other, is_right=True, is_cited=False, tokens=0),
        ]
    )
    assert (found["right"], found["right_paraphrased"]) == (0.75, 0.5)
    assert (found["page_found"], found["page_found_paraphrased"]) == (0.5, 0.5)
    assert (found["tokens_put_in"], found["questions"]) == (15, 4)


def test_no_answers_have_no_shares() -> None:
    assert figures([])["right"] == 0

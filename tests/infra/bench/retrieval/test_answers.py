"""The retrieval benchmark's figures of answers."""

from infra.bench.retrieval.answers import JudgedAnswer, quality_figures
from infra.handbook.handbook import handbook


def test_figures_share_right_answers_overall_and_paraphrased() -> None:
    (page,) = handbook(1)
    plain, paraphrase = page.questions[0], page.paraphrased[0]
    answer_figures = quality_figures(
        [
            JudgedAnswer(plain, is_right=True, is_cited=True, tokens=30),
            JudgedAnswer(plain, is_right=True, is_cited=False, tokens=10),
            JudgedAnswer(paraphrase, is_right=False, is_cited=True, tokens=20),
            JudgedAnswer(paraphrase, is_right=True, is_cited=False, tokens=0),
        ]
    )
    assert (answer_figures["right"], answer_figures["right_paraphrased"]) == (0.75, 0.5)
    assert (answer_figures["page_found"], answer_figures["page_found_paraphrased"]) == (0.5, 0.5)
    assert (answer_figures["tokens_put_in"], answer_figures["questions"]) == (15, 4)


def test_figures_return_zero_share_without_answers() -> None:
    assert quality_figures([])["right"] == 0

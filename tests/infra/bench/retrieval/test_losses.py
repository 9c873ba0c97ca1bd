"""The retrieval benchmark's counts of answers while workers are killed."""

from infra.bench.retrieval.losses import NO_SHARD, WHOLE, ChatOutcome, figures


def test_figures_count_silent_answers_without_page() -> None:
    def answer(
        phase: str, *, is_lost: bool = False, cited: bool, says: bool = False
    ) -> ChatOutcome:
        return ChatOutcome(phase, is_lost=is_lost, is_cited=cited, says_so=says)

    loss_figures = figures(
        [
            answer(WHOLE, cited=True),
            answer(NO_SHARD, cited=True, says=True),
            answer(NO_SHARD, cited=False, says=True),
            answer(NO_SHARD, cited=False),
            answer(NO_SHARD, cited=False, is_lost=True),
        ]
    )
    assert loss_figures[WHOLE] == {"answers": 1, "lost": 0, "cited": 1, "say_so": 0, "silent": 0}
    assert loss_figures[NO_SHARD] == {"answers": 4, "lost": 1, "cited": 1, "say_so": 2, "silent": 1}

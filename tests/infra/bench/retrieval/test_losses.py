"""The retrieval benchmark's counts of answers while workers are killed."""

from infra.bench.retrieval.losses import NO_SHARD, WHOLE, ChatOutcome, figures


def test_what_lacks_its_page_has_to_say_so() -> None:
    def answer(phase: str, *, lost: bool = False, cited: bool, says: bool = False) -> ChatOutcome:
        return ChatOutcome(phase, is_lost=lost, is_cited=cited, says_so=says)

    found = figures(
        [
            answer(WHOLE, cited=True),
            answer(NO_SHARD, cited=True, says=True),
            answer(NO_SHARD, cited=False, says=True),
            answer(NO_SHARD, cited=False),
            answer(NO_SHARD, cited=False, lost=True),
        ]
    )
    assert found[WHOLE] == {"answers": 1, "lost": 0, "cited": 1, "say_so": 0, "silent": 0}
    assert found[NO_SHARD] == {"answers": 4, "lost": 1, "cited": 1, "say_so": 2, "silent": 1}

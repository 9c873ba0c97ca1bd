"""Which questions may have one answer, as far as their words tell."""

import pytest

from infra.bench.retrieval.cache import by_hand, draw_pairs
from streams.openai.cache.guard import asks_the_same, meaning


@pytest.mark.parametrize("pair", [*by_hand(), *draw_pairs(12, 50)], ids=lambda pair: pair.kind)
def test_guard_allows_only_spelling_and_courtesy_to_differ(pair) -> None:  # type: ignore[no-untyped-def]  # a Pair
    is_expected_same = (
        pair.is_same and pair.kind != "words"
    )  # those would be right, too, and are not seen
    assert (
        asks_the_same(pair.first, pair.second)
        == asks_the_same(pair.second, pair.first)
        == is_expected_same
    )


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Could you tell me where the US, US!", ("where", "US", "US")),
        ("A ticket at -5.5 or 1,000?", ("ticket", "at", "-5.5", "or", "1,000")),
        ("", ()),
    ],
)
def test_meaning_keeps_words_with_content(question: str, words: tuple[str, ...]) -> None:
    assert meaning(question) == words


def test_guard_tells_apart_questions_of_courtesy_alone() -> None:
    assert asks_the_same("please", "please") and not asks_the_same("please", "hello")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Was bedeutet Maße?", "Was bedeutet Masse?"),
        ("Translate into French: No, thanks", "Translate into French: No"),
        ('Who says "Yes, please"', 'Who says "Yes'),
        ("Factor a b + a c", "Factor b + c"),
        ("Is 2ⁿ larger than n²?", "Is 2n larger than n²?"),
        ("What is 101₂ in decimal?", "What is 1012 in decimal?"),
    ],
)
def test_guard_rejects_differences_in_content(first: str, second: str) -> None:
    assert not asks_the_same(first, second)

"""Which questions may have one answer, as far as their words tell."""

import pytest

from infra.bench.retrieval.cache import by_hand, draw_pairs
from streams.gateway.cache.guard import asks_the_same, meaning


@pytest.mark.parametrize("pair", [*by_hand(), *draw_pairs(12, 50)], ids=lambda pair: pair.kind)
def test_only_spelling_and_courtesy_may_differ(pair) -> None:  # type: ignore[no-untyped-def]  # a Pair
    wanted = pair.is_same and pair.kind != "words"  # those would be right, too, and are not seen
    assert (
        asks_the_same(pair.first, pair.second) == asks_the_same(pair.second, pair.first) == wanted
    )


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Could you tell me where the US, US!", ("where", "US", "US")),
        ("A ticket at -5.5 or 1,000?", ("ticket", "at", "-5.5", "or", "1,000")),
        ("", ()),
    ],
)
def test_what_carries_something(question: str, words: tuple[str, ...]) -> None:
    assert meaning(question) == words


def test_questions_of_nothing_but_courtesy_are_not_all_one() -> None:
    assert asks_the_same("please", "please") and not asks_the_same("please", "hello")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Was bedeutet Maße?", "Was bedeutet Masse?"),
        ("Translate into French: No, thanks", "Translate into French: No"),
        ('Who says "Yes, please"', 'Who says "Yes'),
        ("Factor a b + a c", "Factor b + c"),
        ("Is 2ⁿ larger than n²?", "Is 2n larger than n²?"),
        ("What is 101₂ in decimal?", "What is 1012 in decimal?"),
    ],
)
def test_what_is_asked_for_is_no_courtesy_nor_spelling(one: str, other: str) -> None:
    assert not asks_the_same(one, other)

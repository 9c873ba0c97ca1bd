"""When an answer searches again, by plain calls."""

import pytest

from schemas.records import Probing
from workers.llm.probing.triggers import Every, SentenceEnd, TriggerInput, Uncertain


def trigger_input(
    tokens: int, text: str = "", *logprobs: float, asked_tokens: int = 0
) -> TriggerInput:
    return TriggerInput(tokens=tokens, asked_tokens=asked_tokens, text=text, logprobs=logprobs)


def test_every_trigger_fires_at_token_interval() -> None:
    trigger = Every(Probing(every=8, lookahead=3))
    assert [trigger.asks(trigger_input(tokens)) for tokens in (4, 5)] == [False, True]
    assert [trigger.is_place(trigger_input(tokens)) for tokens in (7, 8)] == [False, True]


@pytest.mark.parametrize(
    ("text", "is_place"),
    [
        ("It leaves.", True),
        ("Does it? ", True),
        ('He said "go!"', True),
        ("- one\n", True),
        ("それは桟橋です。", True),
        ("It costs 3.", False),  # and 50 cents, it may be
        ("It leaves", False),
        ("It leaves. The", False),
        ("", False),
    ],
)
def test_sentence_trigger_fires_at_first_sentence_end(text: str, is_place: bool) -> None:
    trigger = SentenceEnd(Probing(every=8, lookahead=3))
    assert trigger.is_place(trigger_input(8, text)) == is_place
    assert not trigger.is_place(trigger_input(7, text))
    assert trigger.asks(trigger_input(5, "It"))


def test_uncertain_trigger_fires_at_improbable_tokens() -> None:
    trigger = Uncertain(Probing(every=8, lookahead=3))
    assert trigger.asks(trigger_input(5, "", *[-2.0] * 6))
    assert not trigger.asks(trigger_input(4, "", *[-2.0] * 6))
    assert not trigger.asks(trigger_input(5, "", *[-0.1] * 6))
    assert not trigger.asks(trigger_input(5, "", *[-2.0] * 5))
    assert not trigger.is_place(trigger_input(9, asked_tokens=2))
    assert trigger.is_place(trigger_input(9, asked_tokens=3))

"""One spelling for characters that mean the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.rules.letters import plain_letters


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("the deﬁnition of beneﬁt and eﬀort", "the definition of benefit and effort"),
        ("ＡＢＣ １２３ 𝐛𝐨𝐥𝐝 ｶﾀｶﾅ", "ABC 123 bold カタカナ"),
        ("ﻣﺮﺣﺒﺎ", "مرحبا"),
        ("Donau\xaddampf\ufeff", "Donaudampf"),
        ("10⁶ 2³¹-1 m² 10⁻⁶ word¹ (x)²", "10^6 2^31-1 m^2 10^-6 word^1 (x)^2"),
        ("2ⁿ 10⁻ⁿ eˣ (a)ⁿ x²ⁿ 2ⁿ⁺¹ Ca²⁺ Na⁺", "2^n 10^-n e^x (a)^n x^2n 2^(n+1) Ca^2+ Na+"),
        ("1ˢᵗ 1ᵉʳ 2ᵉ nº 1ª 2²ᵗʰ", "1st 1er 2e no 1a 2^2th"),
        ("1010₂ log₂8 10⁶₂ C₆H₁₂O₆ x₁", "1010_2 log_2 8 10^6_2 C6H12O6 x1"),
        ("1½ cups, ½", "1 1/2 cups, 1/2"),
        ("H₂O 5㎏ № 5", "H2O 5kg No 5"),
        ("Linux™ ①② ´x क्\u200dष", "Linux™ ①② ´x क्\u200dष"),
        ("cafe\u0301", "café"),
    ],
)
def test_plain_letters_replaces_equivalent_characters(written: str, plain: str) -> None:
    assert plain_letters(written) == plain


@given(st.text())
def test_plain_letters_is_idempotent(text: str) -> None:
    once = plain_letters(text)
    assert plain_letters(once) == once

"""Terms of many scripts."""

import pytest

from workers.vector.fulltext.terms import TERM_CHARS_MAX, query_terms, terms_of


def test_terms_fold_words_and_split_at_non_letters() -> None:
    assert terms_of("The pier-7 ferry, PIER_7!") == ["the", "pier", "7", "ferry", "pier", "7"]
    assert terms_of("Die Straße STRASSE, Öl und ŒUVRE") == [
        "die", "strasse", "strasse", "öl", "und", "œuvre"
    ]  # fmt: skip
    assert terms_of("ﬁne ２０２６") == ["fine", "2026"]
    assert terms_of("") == terms_of(" .,;\n—") == []


def test_terms_keep_marks_and_drop_optional_vowels() -> None:
    assert terms_of("हिन्दी भाषा") == ["हिन्दी", "भाषा"]
    assert terms_of("كِتَابٌ") == terms_of("كتاب") == terms_of("كتـــاب") == ["كتاب"]
    assert terms_of("cafe\u0301 CAFÉ") == ["café", "café"]


@pytest.mark.parametrize(
    ("query", "written"),
    [
        ("Donaudampfschifffahrt", "Donau\xaddampf\xadschiff\xadfahrt"),
        ("istanbul", "İstanbul"),
        ("istanbul", "i\u0307stanbul"),
        ("ISPARTA", "ısparta"),
        ("احمد", "أحمد"),
        ("مدرسه", "مدرسة"),
        ("علي", "على"),
        ("كتاب", "کتاب"),
        ("مرحبا", "ﻣﺮﺣﺒﺎ"),
        ("می خواهم", "می\u200cخواهم"),
        ("المدينة", "المَدِينَة"),
        ("המעברת", "הַמַּעֲבֹרֶת"),
        ("צהל", "צה״ל"),
        ('צה"ל', "צה״ל"),
        ("ΑΘΗΝΑ", "Αθήνα"),
        ("елка", "ёлка"),
        ("2026", "٢٠٢٦"),
        ("2026", "२०२६"),
        ("क्ष", "क्\u200dष"),
        ("10^6", "10⁶"),
        ("linux", "Linux™"),
        ("5kg", "5㎏"),
    ],
)
def test_optional_spellings_give_same_term(query: str, written: str) -> None:
    """Lucene's analysers of these languages fold them alike."""
    assert terms_of(query) == terms_of(written)


def test_unspaced_scripts_become_character_pairs() -> None:
    assert terms_of("渡轮码头") == ["渡轮", "轮码", "码头", "渡", "轮", "码", "头"]
    assert query_terms("渡轮码头") == ["渡轮", "轮码", "码头"]
    assert query_terms("猫") == ["猫"] and "猫" in terms_of("黒い猫です")
    assert query_terms("7号码头 ferry") == ["7", "号码", "码头", "ferry"]
    assert set(query_terms("ท่าเรือ")) <= set(terms_of("ไปท่าเรือ"))


def test_terms_keep_emoji() -> None:
    assert terms_of("ferry⛴️ 👍🏽!") == ["ferry", "⛴", "👍"]
    assert query_terms("⛴") == ["⛴"]


def test_terms_cut_long_words_and_queries_drop_repeats() -> None:
    assert terms_of("é" + "a" * 99) == ["é" + "a" * (TERM_CHARS_MAX - 1)]
    assert terms_of("a" * 99) == ["a" * TERM_CHARS_MAX]
    assert query_terms("b a b A") == ["b", "a"]
    assert terms_of("\ud800 x") == ["x"], "half of a pair is no letter"

"""How texts are cut: by structure, within bounds, always in the same way."""

import re
import unicodedata
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.embed.chunking import Span, cut, split_long_tokens
from workers.embed.embedders.hashed import HashEmbedder

STARTS = HashEmbedder().token_starts


def passages(text: str, tokens_max: int = 12, overlap: int = 5) -> list[str]:
    spans = cut(text, STARTS(text), tokens_max=tokens_max, overlap=overlap)
    return [text[span.start : span.end] for span in spans]


def test_a_short_text_is_one_passage_without_the_spaces_around_it() -> None:
    assert passages("\n  The ferry leaves at noon. \n") == ["The ferry leaves at noon."]
    assert cut("  a b", STARTS("  a b"), tokens_max=9, overlap=0) == [Span(2, 5)]
    assert passages("") == passages(" \n\t ") == []


def test_sentences_stay_whole_and_short_ones_are_repeated() -> None:
    text = "One two three four. Five six seven. Eight nine ten eleven. Twelve."
    assert passages(text) == [
        "One two three four. Five six seven.",
        "Five six seven. Eight nine ten eleven. Twelve.",
    ]
    assert passages(text, overlap=0) == [
        "One two three four. Five six seven.",
        "Eight nine ten eleven. Twelve.",
    ]
    assert passages("See e.g. the book. Then go.", 6, 0) == ["See e.g. the", "book. Then go."]


def test_a_heading_begins_a_passage_and_stays_with_what_follows() -> None:
    text = "# Ferries\n\n## Ondry\nFrom pier 7.\n## Sulla\nFrom pier 9.\n"
    assert passages(text) == ["# Ferries\n\n## Ondry\nFrom pier 7.", "## Sulla\nFrom pier 9."]


def test_a_paragraph_is_not_torn_where_it_fits_into_a_passage_of_its_own() -> None:
    text = "One two three four five six.\n\nSeven eight nine. Ten eleven twelve."
    assert passages(text, 10, 0) == text.split("\n\n")
    assert passages("One.\n\n" + text.split("\n\n")[1], 9, 0)[0].startswith("One.\n\nSeven")


def test_code_is_cut_at_lines_and_its_comments_are_no_headings() -> None:
    code = "```\n# first\na = 1\n# second\nb = 22222\n```"
    assert passages(f"Look:\n{code}", 40) == [f"Look:\n{code}"]
    assert all("\n" in each or each.strip() for each in passages(code, 8, 0))
    assert not any(each.startswith("# second") for each in passages(code, 40, 0))
    assert passages("```\n" + "x = 1\n" * 9, 8, 0)[1].startswith("x = 1")


def test_items_of_a_list_stay_whole() -> None:
    text = "Piers:\n- one two three four\n- five six seven eight\n1. nine ten eleven twelve"
    assert passages(text, 8, 0) == [
        "Piers:\n- one two three four",
        "- five six seven eight",
        "1. nine ten eleven twelve",
    ]


def test_a_sentence_that_is_too_long_is_cut_between_words_with_overlap() -> None:
    words = [f"w{number}" for number in range(50)]
    found = passages(" ".join(words), 12, 4)
    assert all(len(each.split()) <= 12 for each in found) and len(found) > 4
    for one, other in zip(found, found[1:], strict=False):
        assert one.split()[-4:] == other.split()[:4]
    assert list(dict.fromkeys(word for each in found for word in each.split())) == words


def test_scripts_without_spaces_are_cut_between_characters_and_after_sentences() -> None:
    text = "渡船从七号码头出发。每十二分钟一班。" * 3
    found = passages(text, 20, 0)
    assert [len(each) for each in found] == [18, 18, 18] and "".join(found) == text
    assert max(len(each) for each in passages("海" * 100, 20, 0)) == 20


def test_what_has_no_space_for_long_is_no_word() -> None:
    starts = range(1_000)  # a tokenizer that counts letters
    spans = cut("a" * 1_000, starts, tokens_max=100, overlap=0)
    assert [span.end - span.start for span in spans] == [100] * 10


@pytest.mark.parametrize("seen", [STARTS, lambda text: [0]], ids=["words", "one unknown token"])
@pytest.mark.parametrize(
    ("text", "longest"),
    [
        ("a1B+" * 500, 400),
        ("ก" * 975, 100),
        ("ກ" * 975, 100),
        ("ខ្មែរ" * 200, 100),
        ("ြမန်မာ" * 200, 100),
        ("海" * 975, 100),
    ],
)
def test_what_a_model_knows_nothing_of_is_cut_by_its_characters(
    text: str, longest: int, seen: Callable[[str], Sequence[int]]
) -> None:
    """One token to its tokenizer, it was one passage, too long for any prompt."""
    starts = split_long_tokens(text, seen(text))
    spans = cut(text, starts, tokens_max=100, overlap=20)
    assert spans[-1].end == len(text) and len(spans) > 1
    assert max(span.end - span.start for span in spans) <= longest
    marks = {span.start for span in spans if unicodedata.category(text[span.start])[0] == "M"}
    assert marks <= {0}, "a mark stays with its letter"


def test_words_that_a_model_knows_are_counted_as_it_does() -> None:
    text = "An antidisestablishmentarian   sentence,\n\n" + " " * 99 + "and more."
    assert split_long_tokens(text, STARTS(text)) == STARTS(text)


def test_a_longer_fence_holds_shorter_ones() -> None:
    code = "````\n```\n# no heading\n```\nx = 1\n````"
    assert passages(f"{code}\n\n# Heading", 60) == [code, "# Heading"]


TEXTS = st.text(st.sampled_from('ab .!?\n#-`1海。\t"é'), max_size=300)


@given(TEXTS, st.integers(1, 20), st.integers(0, 10))
def test_every_word_is_in_a_passage_and_none_is_cut(
    text: str, tokens_max: int, overlap: int
) -> None:
    starts = STARTS(text)
    spans = cut(text, starts, tokens_max=tokens_max, overlap=min(overlap, tokens_max // 2))
    assert spans == cut(text, starts, tokens_max=tokens_max, overlap=min(overlap, tokens_max // 2))
    covered = set[int]()
    for span in spans:
        covered |= set(range(span.start, span.end))
        inside = text[max(0, span.start - 1) : span.start + 1]
        assert not re.fullmatch(r"[a-z1é]{2}", inside), "begins inside a word"
        inside = text[span.end - 1 : span.end + 1]
        assert not re.fullmatch(r"[a-z1é]{2}", inside), "ends inside a word"
        tokens = len([at for at in starts if span.start <= at < span.end])
        words = text[span.start : span.end].split()
        assert tokens <= tokens_max or len(words) == 1
    assert {at for at, sign in enumerate(text) if not sign.isspace()} <= covered
    assert [span.start for span in spans] == sorted({span.start for span in spans})

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


def test_short_text_is_one_stripped_passage() -> None:
    assert passages("\n  The ferry leaves at noon. \n") == ["The ferry leaves at noon."]
    assert cut("  a b", STARTS("  a b"), tokens_max=9, overlap=0) == [Span(2, 5)]
    assert passages("") == passages(" \n\t ") == []


def test_chunking_keeps_sentences_and_repeats_short_ones() -> None:
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


def test_heading_starts_passage_and_stays_with_text() -> None:
    text = "# Ferries\n\n## Ondry\nFrom pier 7.\n## Sulla\nFrom pier 9.\n"
    assert passages(text) == ["# Ferries\n\n## Ondry\nFrom pier 7.", "## Sulla\nFrom pier 9."]


def test_paragraph_stays_whole_within_passage_limit() -> None:
    text = "One two three four five six.\n\nSeven eight nine. Ten eleven twelve."
    assert passages(text, 10, 0) == text.split("\n\n")
    assert passages("One.\n\n" + text.split("\n\n")[1], 9, 0)[0].startswith("One.\n\nSeven")


def test_code_is_cut_at_lines_without_headings() -> None:
    code = "```\n# first\na = 1\n# second\nb = 22222\n```"
    assert passages(f"Look:\n{code}", 40) == [f"Look:\n{code}"]
    assert all("\n" in passage or passage.strip() for passage in passages(code, 8, 0))
    assert not any(passage.startswith("# second") for passage in passages(code, 40, 0))
    assert passages("```\n" + "x = 1\n" * 9, 8, 0)[1].startswith("x = 1")


def test_list_items_stay_whole() -> None:
    text = "Piers:\n- one two three four\n- five six seven eight\n1. nine ten eleven twelve"
    assert passages(text, 8, 0) == [
        "Piers:\n- one two three four",
        "- five six seven eight",
        "1. nine ten eleven twelve",
    ]


def test_long_sentence_is_cut_between_words_with_overlap() -> None:
    words = [f"w{number}" for number in range(50)]
    chunks = passages(" ".join(words), 12, 4)
    assert all(len(chunk.split()) <= 12 for chunk in chunks) and len(chunks) > 4
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert before.split()[-4:] == after.split()[:4]
    assert list(dict.fromkeys(word for chunk in chunks for word in chunk.split())) == words


def test_text_without_spaces_is_cut_between_characters() -> None:
    text = "渡船从七号码头出发。每十二分钟一班。" * 3
    chunks = passages(text, 20, 0)
    assert [len(chunk) for chunk in chunks] == [18, 18, 18] and "".join(chunks) == text
    assert max(len(chunk) for chunk in passages("海" * 100, 20, 0)) == 20


def test_long_run_without_space_is_cut_between_tokens() -> None:
    starts = range(1_000)  # a tokenizer that counts letters
    spans = cut("a" * 1_000, starts, tokens_max=100, overlap=0)
    assert [span.end - span.start for span in spans] == [100] * 10


@pytest.mark.parametrize(
    "token_starts", [STARTS, lambda text: [0]], ids=["words", "one unknown token"]
)
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
def test_text_unknown_to_tokenizer_is_cut_by_characters(
    text: str, longest: int, token_starts: Callable[[str], Sequence[int]]
) -> None:
    """A tokenizer may count such a text as one token, too long a passage for any prompt."""
    starts = split_long_tokens(text, token_starts(text))
    spans = cut(text, starts, tokens_max=100, overlap=20)
    assert spans[-1].end == len(text) and len(spans) > 1
    assert max(span.end - span.start for span in spans) <= longest
    marks = {span.start for span in spans if unicodedata.category(text[span.start])[0] == "M"}
    assert marks <= {0}, "a mark stays with its letter"


def test_known_words_keep_token_starts() -> None:
    text = "An antidisestablishmentarian   sentence,\n\n" + " " * 99 + "and more."
    assert split_long_tokens(text, STARTS(text)) == STARTS(text)


def test_longer_fence_contains_shorter_fences() -> None:
    code = "````\n```\n# no heading\n```\nx = 1\n````"
    assert passages(f"{code}\n\n# Heading", 60) == [code, "# Heading"]


TEXTS = st.text(st.sampled_from('ab .!?\n#-`1海。\t"é'), max_size=300)


@given(TEXTS, st.integers(1, 20), st.integers(0, 10))
def test_passages_cover_every_word_uncut(text: str, tokens_max: int, overlap: int) -> None:
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

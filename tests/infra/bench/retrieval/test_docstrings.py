"""Python's documentation strings as a corpus."""

from infra.bench.retrieval.docstrings import CHARS_MIN, corpus


def test_there_are_enough_and_each_is_told_once() -> None:
    found = corpus()
    assert len(found) >= 500
    assert len({each.text for each in found}) == len({each.document_id for each in found})
    assert len(found) == len({each.document_id for each in found})


def test_no_text_repeats_its_question() -> None:
    for each in corpus():
        assert len(each.text) >= CHARS_MIN
        assert not " ".join(each.text.split()).startswith(each.question)

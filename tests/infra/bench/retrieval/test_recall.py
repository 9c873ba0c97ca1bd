"""Python's documentation strings as a corpus."""

from infra.bench.retrieval.recall import CHARS_MIN, corpus


def test_corpus_has_enough_distinct_texts() -> None:
    documents = corpus()
    assert len(documents) >= 500
    assert len({document.text for document in documents}) == len(
        {document.document_id for document in documents}
    )
    assert len(documents) == len({document.document_id for document in documents})


def test_corpus_texts_do_not_repeat_their_question() -> None:
    for document in corpus():
        assert len(document.text) >= CHARS_MIN
        assert not " ".join(document.text.split()).startswith(document.question)

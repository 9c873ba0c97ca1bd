"""Citations as lines."""

from typing import Any

from infra.terminal.citations import citation_lines

CITED: dict[str, Any] = {
    "document_id": "pier",
    "title": "Ferries",
    "source": "ferries.md",
    "text": "From\npier 7.",
    "score": 0.514,
}


def test_citation_is_one_line() -> None:
    assert list(citation_lines({"citations": [CITED]})) == [
        "[1] Ferries (ferries.md, 0.51): From pier 7."
    ]


def test_citation_of_probe_names_token_position() -> None:
    (line,) = citation_lines({"citations": [{**CITED, "probe": 1, "before_token": 32}]})
    assert line == "[1] Ferries (ferries.md, 0.51, at token 32): From pier 7."


def test_citation_cuts_long_text_and_falls_back_to_document_id() -> None:
    bare = {**CITED, "title": "", "source": "", "text": "word " * 40}
    (line,) = citation_lines({"citations": [bare]})
    assert line.startswith("[1] pier (0.51): word word") and line.endswith(" ...")
    assert len(line) < 110


def test_citations_without_passages_show_error() -> None:
    late = {"citations": [], "error": {"code": "deadline_exceeded", "message": "too late"}}
    assert list(citation_lines(late)) == ["answered without documents: too late"]


def test_citations_without_retrieval_are_empty() -> None:
    assert list(citation_lines({})) == []

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


def test_a_passage_is_a_line() -> None:
    assert list(citation_lines({"citations": [CITED]})) == [
        "[1] Ferries (ferries.md, 0.51): From pier 7."
    ]


def test_a_passage_of_a_probe_tells_where_it_went() -> None:
    (line,) = citation_lines({"citations": [{**CITED, "probe": 1, "before_token": 32}]})
    assert line == "[1] Ferries (ferries.md, 0.51, at token 32): From pier 7."


def test_a_long_text_is_cut_and_what_has_no_title_has_its_id() -> None:
    bare = {**CITED, "title": "", "source": "", "text": "word " * 40}
    (line,) = citation_lines({"citations": [bare]})
    assert line.startswith("[1] pier (0.51): word word") and line.endswith(" ...")
    assert len(line) < 110


def test_an_answer_without_says_why() -> None:
    late = {"citations": [], "error": {"code": "deadline_exceeded", "message": "too late"}}
    assert list(citation_lines(late)) == ["answered without documents: too late"]


def test_an_answer_that_wanted_nothing_has_no_lines() -> None:
    assert list(citation_lines({})) == []

"""What files of each kind say, as text."""

import pytest

from streams.parsing import pdf as pdf_module
from streams.parsing.document import Unreadable
from streams.parsing.html import html
from streams.parsing.kinds import kind_of, parse
from streams.parsing.markdown import markdown
from tests.streams.parsing.pdfs import pdf_bytes

HTML = b"""<html><head><title> My  page </title><style>x</style></head><body><nav>menu</nav>
<h1>Ferries</h1><p>The <b>Ondry</b> ferry<br>leaves.</p><ul><li>one</li><li>two <i>x</i></li></ul>
tail<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table><pre>x = 1
  y</pre><script>bad()</script></body></html>"""
MARKDOWN = b"""# Ferries

The [Ondry](http://x) ferry
leaves *now*. <!-- no -->

- one
- two
  more

| a | b |
|---|---|
| 1 | 2 |

```py
# x
```
<div>some <b>html</b></div>
"""


def test_html_keeps_text_and_structure() -> None:
    document = html(HTML)
    assert document.title == "My page"
    assert document.text == (
        "# Ferries\n\nThe Ondry ferry\nleaves.\n\n- one\n- two x\n\ntail\n\na | b\n1 | 2\n\n"
        "```\nx = 1\n  y\n```"
    )
    assert html(b"<div>" * 5_000 + b"deep").text == "deep"
    assert html(b"").text == ""


def test_markdown_keeps_headings_lists_tables_and_code() -> None:
    document = markdown(MARKDOWN)
    assert document.title == "Ferries"
    assert document.text == (
        "# Ferries\n\nThe Ondry ferry leaves now.\n\n- one\n- two more\n\na | b\n1 | 2\n\n"
        "```\n# x\n```\n\nsome html"
    )
    fronted = markdown(b'---\ntitle: "Boats"\ntags: x\n---\n## Two\n\n# One\n')
    assert (fronted.title, fronted.text) == ("Boats", "## Two\n\n# One")
    assert markdown(b"## Two\n\n# One\n").title == "One"


def test_file_suffix_selects_parser() -> None:
    assert parse(kind_of("a/B.MD"), b"# A")[0].title == "A"
    for name in ("a.bin", "md", "", "a.md.exe", "a.doc", ".."):
        with pytest.raises(Unreadable, match="unknown kind of file"):
            kind_of(name)


@pytest.mark.usefixtures("recursion_limit")
def test_parse_error_names_line_nested_too_deeply() -> None:
    first, second = parse(".jsonl", b'{"id": 1, "text": "a"}\n' + b"[" * 5_000)
    assert (first.wrong, second.place) == ("", "line 2")
    assert second.wrong.startswith("expected a JSON object: maximum recursion depth")


def test_pdf_parser_rejects_too_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_module, "PAGES_MAX", 1)
    with pytest.raises(Unreadable, match="at most 1 pages, found 2; divide it"):
        parse(".pdf", pdf_bytes("one", "two"))


def test_parse_error_names_line_of_number_beyond_float() -> None:
    """Rounding it would let a filter match another number."""
    right = b'{"id": "a", "text": "a", "metadata": {"n": 12.50, "at": 1.2345678901234567}}'
    first, second = parse(
        ".jsonl", right + b"\n" + right.replace(b"12.50", b"0.1234567890123456789")
    )
    assert (first.wrong, first.metadata) == ("", {"n": 12.5, "at": 1.2345678901234567})
    assert second.place == "line 2" and "store it as text" in second.wrong

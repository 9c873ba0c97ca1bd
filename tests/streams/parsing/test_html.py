"""What pages say: tables, powers, lists, titles, XHTML."""

from itertools import pairwise
from typing import Any

import pytest

from streams.parsing import html as html_module
from streams.parsing.html import html
from streams.parsing.kinds import parse


def text(page: str) -> str:
    return html(page.encode()).text


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        ("<td><p>a</p><p>b</p></td><td><div>c</div></td>", "a b | c"),
        ("<td>a</td><td><ul><li>x<li>y</ul></td><td><pre>1\n2</pre></td>", "a | x y | 1 2"),
        ("<td></td><td>b</td><td></td><td>d", "| b | | d"),
        ("<th> a </th><td>first<br>second<br/>third</td>", "a | first second third"),
        ("<td><h3>a</h3></td><td>", "a |"),
        ("<td>1<sup>2</sup></td><td>3</td>", "1^2 | 3"),
        ("<td></td><td> </td>", ""),
    ],
)
def test_html_table_row_becomes_one_line(cells: str, line: str) -> None:
    assert text(f"<table><tr>{cells}</tr></table>") == line


def test_html_layout_table_keeps_blocks() -> None:
    inner = "<table><tr><td>in</td><td>ner</td></tr></table>"
    assert text(f"<table><tr><td><h1>A</h1>{inner}</td><td><p>x</p></td></tr></table>") == (
        "# A\n\nin | ner\n\nx"
    )
    long = "<p>word</p>" * 600
    assert text(f"<table><tr><td>menu</td><td>{long}</td></tr></table>").count("\n\n") == 600
    code = "<pre>" + "x = 1\n" * 12 + "</pre>"
    assert "x = 1\nx = 1" in text(f"<table><tr><td>1</td><td>{code}</td></tr></table>")


def test_html_tables_are_separated_by_blank_line() -> None:
    table = "<table><tr><td>1</td><td>2</td></tr><tr><td>3</td><td>4</td></tr></table>"
    assert text(table + table) == "1 | 2\n3 | 4\n\n1 | 2\n3 | 4"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("About 10<sup>6</sup> rows, 2<sup>31</sup>-1.", "About 10^6 rows, 2^31-1."),
        ("10<sup>-6</sup> m<sup>2</sup> e<sup>x</sup>", "10^-6 m^2 e^x"),
        ("the 1<sup>st</sup> 2<sup>e</sup> Word<sup>TM</sup>", "the 1st 2e WordTM"),
        (
            "2<sup>1/2</sup> 2<sup>n+1</sup> Ca<sup>2+</sup> Na<sup>+</sup>",
            "2^(1/2) 2^(n+1) Ca^2+ Na+",
        ),
        ("1010<sub>2</sub> log<sub>2</sub>8 10<sub>a</sub>", "1010_2 log_2 8 10a"),
        ("x<sup>a<sup>2</sup></sup> so<sup>see note 3</sup>", "x^(a^2) sosee note 3"),
        ("known<sup>[1]</sup> Shen<sup>1</sup> H<sub>2</sub>O", "known[1] Shen^1 H2O"),
    ],
)
def test_html_superscript_becomes_power(source: str, expected: str) -> None:
    assert text(f"<p>{source}</p>") == expected


def test_html_keeps_visible_text() -> None:
    assert text("Press <button>Save</button> to go on.") == "Press Save to go on."
    assert text('See <img alt="a map" src=x>') == "See a map"
    assert text("漢<ruby>字<rt>じ</rt></ruby>") == "漢字"
    assert text('<h2>Usage<a href="#usage">¶</a></h2>') == "## Usage"
    (document,) = parse(".html", b"<title>Donau&shy;dampf</title>Donau&shy;dampf")
    assert (document.title, document.text) == ("Donaudampf", "Donaudampf")


def test_html_list_keeps_numbers() -> None:
    assert text("<ol start=3><li>a<li><p>b</p><ul><li>c</ul><li value=9>d</ol><ul><li>e") == (
        "3. a\n4. b\n- c\n9. d\n- e"
    )


def test_html_title_comes_from_page_head_or_heading() -> None:
    assert html(b"<svg><title>icon</title></svg><h1>Real title</h1>").title == "Real title"
    assert html(b"<title> </title><h1>A <b>b</b></h1>").title == "A b"


def test_html_parser_applies_xml_rules_to_xhtml() -> None:
    page = (
        '<?xml version="1.0"?><!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml">'
        '<head><title/><script src="x"/><style/></head><body><h1>A&nbsp;&amp; b</h1><td/>'
        "<p>All<br/>text</p><![CDATA[x < y]]></body></html>"
    )
    assert text(page) == "# A\xa0& b\n\nAll\ntext\n\nx < y"
    assert text(page.replace("</p>", "")).startswith("# A"), "what is not well-formed, as HTML"
    bomb = '<!DOCTYPE html [<!ENTITY a "aaaaaaaa">' + "".join(
        f'<!ENTITY {name} "{f"&{former};" * 10}">' for former, name in pairwise("abcdefghi")
    )
    assert len(text(f'{bomb}]><html xmlns="http://x"><body>&i;</body></html>')) < 10_000


def test_html_parser_takes_linear_time() -> None:
    """Deeply nested words are not searched for in all their ancestors."""
    assert text("<div>" * 20_000 + "deep <b>x</b>" * 20_000).endswith("deep x")
    assert text("<table><tr><td>" * 2_000 + "deep") == "deep"


def test_html_parser_joins_nested_superscripts_cheaply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level does not join the text of all levels within it."""
    joined = 0

    def count(writer: Any, since: int) -> str:
        nonlocal joined
        joined += len(short_text := short(writer, since))
        return short_text

    short = html_module._BlockWriter._short
    monkeypatch.setattr(html_module._BlockWriter, "_short", count)
    text = html_module.html_text("<sup>1" * 1_000)
    assert text.count("1") == 1_000 and joined < 100_000

"""JSON, JSON lines and tables as text."""

import pytest

from streams.parsing import records
from streams.parsing.document import Unreadable
from streams.parsing.kinds import parse


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("name,age\nAnna,12\nBob,\n", "name | age\nname: Anna | age: 12\nname: Bob"),
        ("1,2\n3,4\n", "1 | 2\n3 | 4"),
        ("Tag;Betrag\n1.2.;1,50\n", "Tag | Betrag\nTag: 1.2. | Betrag: 1,50"),
        ('t,x\n"He said ""hi"", ok","l1\nl2"\n', 't | x\nt: He said "hi", ok | x: l1 l2'),
        ("word\nAnna\n", "word\nword: Anna"),
        ("a,b\n1,2,3\n", "a | b\na: 1 | b: 2 | 3"),
        ("a\tb\n1\t2", "a | b\na: 1 | b: 2"),
        ("only, one", "only | one"),
    ],
)  # fmt: skip
def test_csv_row_names_columns(source: str, expected: str) -> None:
    assert parse(".csv", source.encode())[0].text == expected


def test_json_becomes_line_per_value_with_exact_digits() -> None:
    source = (
        b'{"a": {"b": 1.50, "c": [1, "x"]}, "d": [{"e": 12345678901234567890123}, {"e": true}]}'
    )
    assert parse(".json", source)[0].text == (
        "a.b: 1.50\na.c: 1, x\nd[0].e: 12345678901234567890123\nd[1].e: true"
    )
    assert parse(".json", b'[{"a": 1}, {"a": "\\u00fc"}]')[0].text == "a: 1\n\na: ü"


@pytest.mark.usefixtures("recursion_limit")
def test_json_parser_rejects_invalid_and_oversized_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (b"{", b"[" * 50_000):
        with pytest.raises(Unreadable, match="expected JSON"):
            parse(".json", source)
    monkeypatch.setattr(records, "TEXT_CHARS_MAX", 100)
    nested = b'{"' + b"a" * 40 + b'": [{"b": 1}, {"b": 2}, {"b": 3}]}'
    with pytest.raises(Unreadable, match="at most 100 characters of text; divide it"):
        parse(".json", nested)


def test_json_line_needs_no_document_id() -> None:
    first, second = parse(".jsonl", b'{"text": "x"}\n\n{"id": true, "text": "y"}')
    assert (first.document_id, first.place, first.wrong) == ("", "line 1", "")
    assert (second.place, second.wrong[:14]) == ("line 3", "expected an id")

"""The input of a custom tool's call: the same however its arguments arrive."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.openai.responses.custom_input import InputReader, arguments_of


def read(pieces: list[str]) -> list[str]:
    """What each piece of the arguments adds to the input, and what their end adds."""
    reader = InputReader()
    return [*(reader.feed(piece) for piece in pieces), reader.finish()]


TEXTS = st.text(alphabet=st.sampled_from('a"\\/\n\té😀\U0001f680 {}u0')) | st.text()


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 400)))
def test_input_does_not_depend_on_pieces(text: str, ascii_only: bool, cuts: list[int]) -> None:
    """Escapes are cut anywhere."""
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    ends = sorted({0, len(arguments), *(cut for cut in cuts if cut < len(arguments))})
    pieces = [arguments[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    assert "".join(read(pieces)) == "".join(read(list(arguments))) == text


@given(st.text())
def test_any_arguments_have_an_input(arguments: str) -> None:
    """A model may write anything; the input has no half of a character, which JSON refuses."""
    "".join(read(list('{"input":"' + arguments))).encode()
    "".join(read([arguments])).encode()


def test_input_arrives_as_it_is_written() -> None:
    assert read(['{"inp', 'ut" : "a', "b\\", "nc", '\\u00e9"', "}", "x"]) == [
        *("", "a", "b", "\nc", "é", "", ""),
        "",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ('{"text": "a"}', '{"text": "a"}'),
        ('{"x": 1, "input": "a"}', "a"),
        ('"a"', "a"),
        ("not JSON", "not JSON"),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut\\"),
        ('{"input": "\\ud83d', "�"),
        ('{"input": "\\ud83dx"}', "�x"),
        ('{"input": "\\uzzzz"}', "\\uzzzz"),
    ],
)
def test_unusual_arguments_have_an_input(arguments: str, text: str) -> None:
    assert "".join(read(list(arguments))) == text


def test_arguments_of_an_input_are_json() -> None:
    assert json.loads(arguments_of('a "b"\n')) == {"input": 'a "b"\n'}

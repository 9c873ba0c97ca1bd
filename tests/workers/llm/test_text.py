"""Stop strings over pieces, and what the simulated engine can say."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import Tokenizer

from schemas.errors import ConfigError
from workers.llm.sim.vocabulary import load_vocabulary, make_sim_model
from workers.llm.text import StopText


def shown(pieces: list[str], stops: list[str], *, include_stop: bool = False) -> tuple[str, str]:
    """What is shown of an answer in these pieces, and the stop that ended it."""
    text, out = StopText(stops, include_stop=include_stop), ""
    for piece in pieces:
        out += text.feed(piece)
        if text.matched:
            return out, text.matched
    return out + text.flush(), ""


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["one", " two"], [], ("one two", "")),
        (["one", " two"], [" t"], ("one", " t")),
        (["a", "b", "c", "d"], ["bc"], ("a", "bc")),
        (["a", "b", "x"], ["bc"], ("abx", "")),
        (["aab"], ["ab", "aab"], ("", "aab")),  # the one that begins first
        (["aa", "ab"], ["aab"], ("a", "aab")),  # a false start within
        (["ab"], ["abc"], ("ab", "")),
        (["ab"], [""], ("ab", "")),
    ],
)
def test_stop_strings(pieces: list[str], stops: list[str], expected: tuple[str, str]) -> None:
    assert shown(pieces, stops) == expected


def test_stop_string_can_be_kept() -> None:
    assert shown(["a", "b", "cd"], ["bc"], include_stop=True) == ("abc", "bc")


def test_text_that_may_become_a_stop_is_held_back() -> None:
    text = StopText(["END"], include_stop=False)
    assert text.feed("a E") == "a "
    assert text.feed("N") == ""
    assert text.feed("x") == "ENx"


def test_stop_is_not_honoured_before_it_may() -> None:
    text = StopText(["b"], include_stop=False)
    assert text.feed("ab", may_stop=False) == "ab"
    assert not text.matched


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1)))
def test_pieces_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    out, matched = shown(pieces, stops)
    if matched:
        assert whole.startswith(out + matched)
        assert not any(stop in out for stop in stops)
    else:
        assert out == whole
        assert not any(stop in whole for stop in stops)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sim_model(tmp_path_factory.mktemp("sim") / "model")


def test_folder_and_built_in_say_the_same(folder: Path) -> None:
    assert load_vocabulary(str(folder), 4_096) == load_vocabulary("sim", 4_096)


def test_pieces_join_to_what_the_tokenizer_decodes(folder: Path) -> None:
    vocabulary = load_vocabulary(str(folder), 4_096)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [vocabulary.ids[i][0] for i in range(vocabulary.size)]
    assert tokenizer.decode(ids) == "".join(vocabulary.texts[: vocabulary.size])
    assert all(text.isprintable() and text for text in vocabulary.texts[: vocabulary.size])
    assert vocabulary.texts[vocabulary.size] == ""


@pytest.mark.parametrize("text", ["Zürich 🙂\n\ttabs", "the river and the stone", "漢字", ""])
def test_tokenizer_loses_nothing(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template_renders(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = Environment(autoescape=False).from_string(config["chat_template"])
    messages = [{"role": "user", "content": "Hello"}]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_vocabulary_is_bounded() -> None:
    assert load_vocabulary("sim", 10).size == 10


def test_missing_folder_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected tokenizer\.json"):
        load_vocabulary(str(tmp_path), 10)

"""The tiny model: reproducible, reused, and with a chat template that extends by turns."""

import json
from pathlib import Path

import numpy as np
import pytest
from jinja2 import Environment
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from schemas.model.parsers import ParserNames, parsers_of
from schemas.settings import ModelSettings
from workers.models import tiny
from workers.models.folder import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models"))


def test_tiny_model_is_reused(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_tiny_model(folder.parent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no draft stays


def test_tiny_model_is_reproducible(folder: Path, tmp_path: Path) -> None:
    second_folder = make_tiny_model(tmp_path)
    assert second_folder.name == folder.name
    for path in folder.iterdir():
        assert (second_folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_tiny_model_weights_match_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert weights["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert sum(tensor.size for tensor in weights.values()) == pytest.approx(3.4e6, rel=0.05)
    assert {tensor.dtype for tensor in weights.values()} == {np.dtype("float32")}


@pytest.mark.parametrize(
    "text", ["The river does not ask.", "Zürich 🙂 \n\ttabs", "<html>{}</html>", ""]
)
def test_tiny_tokenizer_round_trips_text(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tiny_tokenizer_keeps_special_tokens_whole(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for token_id, token in enumerate(tiny.SPECIAL_TOKENS):
        assert tokenizer.encode(token).ids == [token_id]


def test_tiny_chat_template_extends_by_turns() -> None:
    template = Environment(autoescape=False).from_string(tiny.CHAT_TEMPLATE)
    turn = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    first = template.render(messages=turn, add_generation_prompt=True)
    assert first == "<|begin|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
    answered = [*turn, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
    second = template.render(messages=answered, add_generation_prompt=True)
    assert second == first + "Hi<|end|><|user|>More<|end|><|assistant|>"


def test_tiny_chat_template_writes_tools_as_hermes_does(folder: Path) -> None:
    """So the parser of this form is guessed, and real vLLM runs it without a real model."""
    template = Environment(autoescape=False).from_string(tiny.CHAT_TEMPLATE)
    function = {"name": "weather", "parameters": {"type": "object"}}
    arguments = {"city": "Rome"}
    call = {"function": {"name": "weather", "arguments": arguments}}
    as_text = {"function": {"name": "weather", "arguments": json.dumps(arguments)}}
    turns = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call, as_text]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    text = template.render(messages=turns, tools=[{"type": "function", "function": function}])
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    before, after = text.split("<|user|>Rome?<|end|>")
    assert json.dumps(function) in before and "<tool_call>" in before
    assert after == (
        f"<|assistant|>{written}{written}<|end|>"
        "<|user|><tool_response>\nsunny\n</tool_response><|end|>"
    )
    assert parsers_of(ModelSettings(path=str(folder))) == ParserNames(tool="hermes")


def test_tiny_model_rejects_short_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Too short a text.")
    monkeypatch.setattr(tiny, "CORPUS", corpus)
    with pytest.raises(ValueError, match="expected text for 2048 tokens"):
        make_tiny_model(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []

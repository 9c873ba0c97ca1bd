"""What the simulated engine can say, and the model folder that it says it with."""

import json
from pathlib import Path

import pytest
from jinja2 import Environment
from tokenizers import Tokenizer

from schemas.errors import ConfigError
from workers.llm.sim.vocabulary import load_vocabulary
from workers.models.sim import make_sim_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sim_model(tmp_path_factory.mktemp("sim") / "model")


def test_folder_vocabulary_equals_builtin_vocabulary(folder: Path) -> None:
    assert load_vocabulary(str(folder)) == load_vocabulary("sim")


def test_vocabulary_texts_join_to_decoded_text(folder: Path) -> None:
    vocabulary = load_vocabulary(str(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [vocabulary.ids[i][0] for i in range(vocabulary.size)]
    assert tokenizer.decode(ids) == "".join(vocabulary.texts[: vocabulary.size])
    assert all(text.isprintable() and text for text in vocabulary.texts[: vocabulary.size])
    assert vocabulary.texts[vocabulary.size] == ""


@pytest.mark.parametrize("text", ["Zürich 🙂\n\ttabs", "the river and the stone", "漢字", ""])
def test_tokenizer_round_trips_text(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template_renders(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = Environment(autoescape=False).from_string(config["chat_template"])
    messages = [{"role": "user", "content": "Hello"}]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_vocabulary_respects_size_limit() -> None:
    assert load_vocabulary("sim", 10).size == 10


def test_vocabulary_load_rejects_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected tokenizer\.json"):
        load_vocabulary(str(tmp_path), 10)

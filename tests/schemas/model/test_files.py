"""Which folders can be served, and where their chat templates are."""

import json
import shutil
from pathlib import Path

import pytest

from schemas.errors import ConfigError, InvalidRequest
from schemas.model.files import model_folder
from schemas.settings import ModelSettings
from streams.calls.request.chat import Chat
from streams.calls.request.tokenizer import Tokenizer
from tests.schemas.model.steered_models import steered

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}]


def test_folder_without_template_serves_only_completions(tmp_path: Path) -> None:
    shutil.copy(steered("sim").folder / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
        Tokenizer(tmp_path).render(Chat(messages=MESSAGES))


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "J{{ messages|length }}"},
        {"chat_template.json": json.dumps({"chat_template": "J{{ messages|length }}"})},
        {"tokenizer_config.json": json.dumps({"chat_template": "J{{ messages|length }}"})},
        {
            "tokenizer_config.json": json.dumps(
                {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "J{{ messages|length }}"},
                    ]
                }
            )
        },
    ],
)
def test_tokenizer_finds_template_in_any_of_its_files(
    tmp_path: Path, files: dict[str, str]
) -> None:
    shutil.copy(steered("sim").folder / "tokenizer.json", tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert Tokenizer(tmp_path).render(Chat(messages=MESSAGES)) == "J2"


def test_model_folder_errors_name_missing_part(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a fast tokenizer"):
        Tokenizer(tmp_path)
    shutil.copy(steered("sim").folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config.json: expected JSON"):
        Tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="expected a folder or a Hugging Face name"):
        model_folder(ModelSettings(path="no/such/model", revision="0" * 40))
    with pytest.raises(ConfigError, match="model.revision: expected the commit of 'no/such/model'"):
        model_folder(ModelSettings(path="no/such/model"))

"""What a gateway and a bridge load before they join the fleet."""

import shutil
from pathlib import Path

from schemas.model.parsers import ParserNames
from schemas.settings import ModelSettings
from streams.calls.process import load_models
from tests.streams.gateway.small_tokenizer import tokenizer_folder


async def test_loaded_model_has_parsers_of_its_template(tmp_path: Path) -> None:
    shutil.copytree(tokenizer_folder(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("<tool_call>{{ arguments }}")
    card = (await load_models([ModelSettings(path=str(tmp_path), name="m")], 1)).default.card
    assert (card.name, card.parsers) == ("m", ParserNames(tool="hermes"))
    model = ModelSettings(path=str(tmp_path), tool_parser="none", reasoning_parser="qwen3")
    card = (await load_models([model], 1)).default.card
    assert card.parsers == ParserNames(reasoning="qwen3")

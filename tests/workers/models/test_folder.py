"""Models are made where a name asks for one, and given folders stay what they are."""

from pathlib import Path

import pytest

from schemas.settings import ModelSettings
from workers.models.folder import model_folder


@pytest.mark.parametrize(("name", "file"), [("tiny", "model.safetensors"), ("sim", "config.json")])
def test_only_our_own_names_are_made(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    assert model_folder(ModelSettings(path="org/model")) == "org/model"
    made = Path(model_folder(ModelSettings(path=name)))
    assert made.parent == tmp_path / "models"
    assert (made / file).exists()
    assert model_folder(ModelSettings(path=name)) == str(made)
    assert list(made.parent.iterdir()) == [made]  # no draft stays

"""Adapters that do not fit are found before an engine loads them, by a message that names them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.model.adapters import (
    CONFIG_FILE,
    OTHER_WEIGHTS_FILE,
    RANKS,
    WEIGHTS_FILE,
    check_adapters,
    loaded_max,
    rank_room,
    resolve_adapters,
)
from schemas.settings import ModelSettings
from workers.models.folder import make_tiny_model
from workers.models.random_adapters import make_adapter
from workers.models.sim import make_sim_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models"))


def model(base: Path, **folders: Path | str) -> ModelSettings:
    adapters = {name: str(folder) for name, folder in folders.items()}
    return ModelSettings(path=str(base), name="base", adapters=adapters)


def change(file: Path, **values: Any) -> None:
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))


def test_adapters_are_checked_in_order_of_settings(base: Path, tmp_path: Path) -> None:
    second = make_adapter(tmp_path / "b", base, 1, rank=9)
    first = make_adapter(tmp_path / "a", base, 2)
    adapters = check_adapters(model(base, b=second, a=first))
    assert [(adapter.name, adapter.rank) for adapter in adapters] == [("b", 9), ("a", 8)]
    assert adapters[0].folder == second
    assert rank_room(adapters) == 16
    assert rank_room(()) == 1
    assert check_adapters(model(base)) == ()


def test_adapter_folders_become_absolute(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path / "legal", base, 1)
    monkeypatch.chdir(tmp_path)
    resolved_model = resolve_adapters(model(base, law="legal"))
    assert resolved_model.adapters == {"law": str(tmp_path / "legal")}
    assert resolve_adapters(resolved_model) == resolved_model


def test_largest_rank_of_layers_counts(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path, base, 1)
    change(adapter / CONFIG_FILE, rank_pattern={"q_proj": 64})
    assert check_adapters(model(base, a=adapter))[0].rank == 64


def test_simulated_model_needs_no_weights(tmp_path: Path) -> None:
    base = make_sim_model(tmp_path / "sim")
    adapter = make_adapter(tmp_path / "a", base, 1)
    assert not (adapter / WEIGHTS_FILE).exists()
    assert check_adapters(model(base, a=adapter))[0].rank == 8


def test_number_of_loaded_adapters_is_bounded() -> None:
    adapters = {f"a{number}": "x" for number in range(9)}
    assert loaded_max(ModelSettings(path="tiny", adapters=adapters, adapters_max=2)) == 8
    assert loaded_max(ModelSettings(path="tiny", adapters=adapters, adapters_max=4)) == 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 0}, "ranks from 1 to 512 in adapter_config.json, found 0"),
        ({"r": RANKS[-1] + 1}, "ranks from 1 to 512 in adapter_config.json, found 513"),
        ({"r": None}, "found None"),
        ({"r": "8"}, "found '8'"),
        ({"r": True}, "found True"),
        ({"rank_pattern": {"q_proj": 1_024}}, "found 1024"),
        ({"rank_pattern": [8]}, r"found \[8\]"),
        ({"peft_type": "LOHA"}, "expected peft_type LORA in adapter_config.json, found 'LOHA'"),
    ],
)
def test_wrong_configuration_is_refused(
    base: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    adapter = make_adapter(tmp_path, base, 1)
    change(adapter / CONFIG_FILE, **values)
    with pytest.raises(ConfigError, match=rf"^model\.adapters\.a: .*{message}"):
        check_adapters(model(base, a=adapter))


@pytest.mark.parametrize("name", ["", " ", "a\nb", "base"])
def test_wrong_name_is_refused(base: Path, tmp_path: Path, name: str) -> None:
    adapter = make_adapter(tmp_path, base, 1)
    with pytest.raises(ConfigError, match=r"expected a name other than the model's, 'base'"):
        check_adapters(replace(model(base), adapters={name: str(adapter)}))


def test_missing_files_are_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapters\.a: expected a folder with adapter_config"):
        check_adapters(model(base, a=tmp_path / "none"))
    adapter = make_adapter(tmp_path, base, 1)
    (adapter / WEIGHTS_FILE).rename(adapter / OTHER_WEIGHTS_FILE)
    assert check_adapters(model(base, a=adapter)), "vLLM reads this file too"
    (adapter / OTHER_WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigError, match=r"adapters\.a: expected adapter_model\.safetensors in"):
        check_adapters(model(base, a=adapter))


@pytest.mark.parametrize("data", [b"", b"{}", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 32])
def test_damaged_weights_are_refused(base: Path, tmp_path: Path, data: bytes) -> None:
    adapter = make_adapter(tmp_path, base, 1)
    (adapter / WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(ConfigError, match=r"adapters\.a: expected safetensors with a header"):
        check_adapters(model(base, a=adapter))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 512}, "found one of .*: its hidden size is 256, the model's 512"),
        ({"num_hidden_layers": 3}, "found one of .*: it has layer 3, the model has 3 layers"),
        ({"text_config": {"hidden_size": 128}}, "found one of .*: .* is 256, the model's 128"),
    ],
)
def test_adapter_of_another_model_is_refused(
    base: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    adapter = make_adapter(tmp_path / "a", base, 1)
    other_base = tmp_path / "other"
    other_base.mkdir()
    (other_base / "config.json").write_text((base / "config.json").read_text())
    change(other_base / "config.json", **values)
    with pytest.raises(ConfigError, match=rf"adapters\.a: expected an adapter of base, {message}"):
        check_adapters(model(other_base, a=adapter))


def test_model_without_sizes_takes_any_adapter(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", base, 1)
    assert check_adapters(model(tmp_path / "none", a=adapter))


def test_weights_without_lora_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", base, 1)
    (adapter / WEIGHTS_FILE).write_bytes((base / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="expected lora_A and lora_B in adapter_model"):
        check_adapters(model(base, a=adapter))

"""Generated adapters: reproducible, and of the shapes of their model."""

import json
from pathlib import Path

from safetensors.numpy import load_file

from workers.models.folder import make_tiny_model
from workers.models.random_adapters import make_adapter


def test_adapter_is_reproducible_and_depends_on_seed(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "models")
    first, second, third = (
        make_adapter(tmp_path / name, base, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for path in first.iterdir():
        assert (second / path.name).read_bytes() == path.read_bytes(), path.name
    weights = "adapter_model.safetensors"
    assert (third / weights).read_bytes() != (first / weights).read_bytes()


def test_adapter_fits_its_model(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "models")
    folder = make_adapter(tmp_path / "a", base, 1, rank=4)
    model = load_file(base / "model.safetensors")
    updates = load_file(folder / "adapter_model.safetensors")
    modules = {name.rpartition(".lora_")[0] for name in updates}
    for module in modules:
        change = updates[f"{module}.lora_B.weight"] @ updates[f"{module}.lora_A.weight"]
        matrix = model[f"{module.removeprefix('base_model.model.')}.weight"]
        assert change.shape == matrix.shape, module
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert len(modules) == 4 * len(config["target_modules"])

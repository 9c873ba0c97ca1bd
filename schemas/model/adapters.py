"""LoRA adapters over a model: reads from their files whether they exist and fit. Imports no engine.

An adapter is a folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.
vLLM checks the weights only when it loads them, and it takes smaller ones than its model's for
right ones. So a start calls `check_adapters` first. Of weights in another file (`.bin`), and of
models without `hidden_size`, only the configuration is checked.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from schemas.errors import ConfigError
from schemas.frozen import frozen
from schemas.model.files import read_json
from schemas.settings import ModelSettings

CONFIG_FILE, WEIGHTS_FILE, OTHER_WEIGHTS_FILE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
SIMULATED: Final = "trivium-sim"  # model_type of models without weights
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks for which vLLM has room, at most
# Layers whose input, and those whose output, has the size of the model's hidden state.
_READ_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_WRITE_HIDDEN = ("o_proj", "down_proj")
_LOADED_FACTOR = 4  # adapters that stay loaded for each one that a batch may use
_HEADER_BYTES_MAX = 64 << 20
_LAYER = re.compile(r"\.layers\.(\d+)\.(?:.*\.)?(\w+)\.lora_([AB])\.weight$")


@frozen
class AdapterFolder:
    """An adapter whose files were checked."""

    name: str
    folder: Path
    rank: int  # the largest of its layers


def check_adapters(model: ModelSettings) -> tuple[AdapterFolder, ...]:
    """Return the model's adapters in the order of the settings. Raise ConfigError, which names the
    adapter, if one has a wrong name or rank, lacks a file, or was made for another model.

    `model.path` is the model's folder, or a name of which nothing is here yet.
    """
    base = read_json(Path(model.path) / "config.json")
    return tuple(_checked(model, name, Path(path), base) for name, path in model.adapters.items())


def resolve_adapters(model: ModelSettings) -> ModelSettings:
    """Return the settings with absolute folders of adapters. Raises as `check_adapters`."""
    folders = {adapter.name: str(adapter.folder) for adapter in check_adapters(model)}
    return replace(model, adapters=folders)


def rank_of(folder: str) -> int:
    """Return the largest rank of an adapter's layers; 0 if its folder does not tell."""
    try:
        return _rank(folder, read_json(Path(folder) / CONFIG_FILE))
    except (ConfigError, OSError):
        return 0


def loaded_max(model: ModelSettings) -> int:
    """Return how many of the model's adapters an engine keeps loaded, at most."""
    return min(len(model.adapters), _LOADED_FACTOR * model.adapters_max)


def rank_room(adapters: tuple[AdapterFolder, ...]) -> int:
    """Return the smallest rank that vLLM has room for and that all these adapters fit in."""
    largest = max((adapter.rank for adapter in adapters), default=1)
    return next(rank for rank in RANKS if rank >= largest)


def _checked(
    model: ModelSettings, name: str, folder: Path, base: Mapping[str, Any]
) -> AdapterFolder:
    place = f"model.adapters.{name}"
    if not name.strip() or not name.isprintable() or name == model.served_name:
        raise ConfigError(
            f"model.adapters: expected a name other than the model's, {model.served_name!r}, "
            f"found {name!r}"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{place}: expected a folder with {CONFIG_FILE}, found {str(folder)!r}")
    config = read_json(folder / CONFIG_FILE)
    adapter = AdapterFolder(name=name, folder=folder.absolute(), rank=_rank(place, config))
    is_simulated = base.get("model_type") == SIMULATED
    if (folder / WEIGHTS_FILE).is_file():
        if not is_simulated:
            _check_fit(place, model, config, _shapes(place, folder / WEIGHTS_FILE), base)
    elif not is_simulated and not (folder / OTHER_WEIGHTS_FILE).is_file():
        raise ConfigError(f"{place}: expected {WEIGHTS_FILE} in {str(folder)!r}, found none")
    return adapter


def _rank(place: str, config: Mapping[str, Any]) -> int:
    """Return the largest rank of an adapter's layers."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"{place}: expected peft_type LORA in {CONFIG_FILE}, found {kind!r}")
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [patterns])]
    for rank in ranks:
        if type(rank) is not int or not 1 <= rank <= RANKS[-1]:
            raise ConfigError(
                f"{place}: expected ranks from 1 to {RANKS[-1]} in {CONFIG_FILE}, found {rank!r}"
            )
    return max(map(int, ranks))


def _shapes(place: str, path: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a safetensors file, by name."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size <= _HEADER_BYTES_MAX else b""
    try:
        tensors = json.loads(header)
        return {
            name: [*map(int, tensor["shape"])]
            for name, tensor in tensors.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"{place}: expected safetensors with a header, found something else in {str(path)!r}"
        ) from None


def _check_fit(
    place: str,
    model: ModelSettings,
    config: Mapping[str, Any],
    shapes: Mapping[str, list[int]],
    base: Mapping[str, Any],
) -> None:
    """Raise ConfigError if no layer of the adapter fits the model, or if it has more layers."""
    text = base.get("text_config") or base
    hidden, layers = text.get("hidden_size"), text.get("num_hidden_layers")
    made_for = config.get("base_model_name_or_path") or "a model that it does not name"
    wrong = f"{place}: expected an adapter of {model.served_name}, found one of {made_for}: "
    if not any(name.endswith(".lora_A.weight") for name in shapes):
        raise ConfigError(f"{place}: expected lora_A and lora_B in {WEIGHTS_FILE}, found neither")
    highest = max((number for number, _ in _layers(shapes)), default=-1)
    if isinstance(layers, int) and highest >= layers:
        raise ConfigError(f"{wrong}it has layer {highest}, the model has {layers} layers")
    sizes = {size for _, size in _layers(shapes) if size}
    if isinstance(hidden, int) and sizes and hidden not in sizes:
        found_sizes = ", ".join(map(str, sorted(sizes)))
        raise ConfigError(f"{wrong}its hidden size is {found_sizes}, the model's {hidden}")


def _layers(shapes: Mapping[str, list[int]]) -> Iterator[tuple[int, int]]:
    """Yield the number of each tensor's layer, and the hidden size that it shows; 0: none."""
    for name, shape in shapes.items():
        if (match := _LAYER.search(name)) is None:
            continue
        number, module, side = match.groups()
        size = 0
        if len(shape) == 2 and side == "A" and module in _READ_HIDDEN:
            size = shape[1]
        if len(shape) == 2 and side == "B" and module in _WRITE_HIDDEN:
            size = shape[0]
        yield int(number), size

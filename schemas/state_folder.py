"""The state folder, in which the processes of this machine store data, logs and models."""

import os
import stat
from pathlib import Path

from schemas.errors import ConfigError


def home() -> Path:
    """Return the state folder: broker data, logs, process ids and models made here."""
    return Path(os.environ.get("TRIVIUM_HOME", ".trivium")).absolute()


def private_folder(path: Path) -> Path:
    """Create a folder that only its owner can read; make an existing one private.

    Raises ConfigError for a folder that others may write to, because it may not be ours.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.stat().st_mode
    if mode & (stat.S_ISVTX | stat.S_IWOTH):
        raise ConfigError(
            f"{path}: expected a folder of our own, found one that others may write to; name "
            "another with TRIVIUM_HOME"
        )
    if stat.S_IMODE(mode) & 0o077:
        path.chmod(0o700)
    return path

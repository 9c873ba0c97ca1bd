"""The key that signs event ids: one per deployment, so that any gateway accepts the others' ids.

The key is the setting `event_key` (by environment or file, as every secret). Without it, the key is
in the file `event.key` in the state folder. The first gateway there creates the file; only its
owner can read it. Gateways on several hosts need the setting, or a copy of that file.
"""

import os
import secrets
from pathlib import Path

from schemas.errors import ConfigError
from streams.calls.config import EVENT_KEY_CHARS_MIN

FILE_NAME = "event.key"


def event_key(setting: str, folder: Path) -> str:
    """Return the setting, or the folder's key; raises ConfigError for a file without a key."""
    return setting or _from_folder(folder / FILE_NAME)


def _from_folder(path: Path) -> str:
    try:
        if not path.exists():
            _make(path)
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the key of event ids cannot be read: {error}") from error
    if len(key) < EVENT_KEY_CHARS_MIN:
        raise ConfigError(
            f"{path}: expected a key of at least {EVENT_KEY_CHARS_MIN} characters, found "
            f"{len(key)}; delete the file"
        )
    return key


def _make(path: Path) -> None:
    """Create the key file atomically; of processes that start at the same time, only one creates
    it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f"{FILE_NAME}.{secrets.token_hex(8)}")
    with open(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(new, path)
    except FileExistsError:
        pass  # another process was first
    finally:
        new.unlink()

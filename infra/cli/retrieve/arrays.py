"""Reads the .npy files that people name, for the commands that take vectors."""

from pathlib import Path
from typing import Any

from schemas.errors import ConfigError


def read_array(path: Path) -> Any:
    """The array of numbers in a .npy file, mapped; raises ConfigError saying what is there."""
    import numpy as np

    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:  # numpy advises to unpickle whatever it is
        raise ConfigError(
            f"{path}: expected a .npy file with numbers, as numpy.save writes it, found another"
        ) from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu":
        kind = getattr(found, "dtype", "several arrays, an .npz file")
        raise ConfigError(f"{path}: expected one array of numbers, found {kind}")
    return found


def read_rows(path: Path) -> Any:
    """The same, of shape (rows, values)."""
    found = read_array(path)
    if found.ndim != 2 or not found.shape[1]:
        raise ConfigError(f"{path}: expected numbers in rows, found shape {found.shape}")
    return found


def read_vector(path: Path) -> Any:
    """The same, of shape (values,); one row is a vector as well."""
    found = read_array(path)
    if found.ndim == 2 and len(found) == 1:
        found = found[0]
    if found.ndim != 1:
        raise ConfigError(f"{path}: expected one vector, found shape {found.shape}")
    return found

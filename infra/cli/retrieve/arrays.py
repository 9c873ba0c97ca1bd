"""Reads the .npy files that people name, for the commands that take vectors."""

from pathlib import Path
from typing import Any

from schemas.errors import ConfigError


def read_array(path: Path) -> Any:
    """The array of numbers in a .npy file, mapped; raises ConfigError saying what is there."""
    import numpy as np

    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:  # numpy advises to unpickle whatever it is
        raise ConfigError(
            f"{path}: expected a .npy file with numbers, as numpy.save writes it, found another"
        ) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        kind = getattr(array, "dtype", "several arrays, an .npz file")
        raise ConfigError(f"{path}: expected one array of numbers, found {kind}")
    return array


def read_rows(path: Path) -> Any:
    """The same, of shape (rows, values)."""
    array = read_array(path)
    if array.ndim != 2 or not array.shape[1]:
        raise ConfigError(f"{path}: expected numbers in rows, found shape {array.shape}")
    return array


def read_vector(path: Path) -> Any:
    """The same, of shape (values,); one row is a vector as well."""
    array = read_array(path)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1:
        raise ConfigError(f"{path}: expected one vector, found shape {array.shape}")
    return array

"""Vectors of real images, which scikit-learn bundles. Shapes are (rows, dim), float32."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def digits(queries: int = 200, *, seed: int = 0) -> tuple[Array, Array]:
    """The handwritten digits that scikit-learn bundles, 64 dimensions, some held out as queries."""
    from sklearn.datasets import load_digits

    return _held_out(load_digits().data.astype(np.float32), queries, seed)


def patches(rows: int, queries: int, *, seed: int = 0) -> tuple[Array, Array]:
    """8 x 8 pixels from the photographs that scikit-learn bundles, 192 dimensions."""
    from sklearn.datasets import load_sample_images

    found = []
    view: Any = np.lib.stride_tricks.sliding_window_view  # its types know one axis only
    for image in load_sample_images().images:
        windows = view(image, (8, 8), axis=(0, 1))[::2, ::2]
        found.append(windows.reshape(-1, 192))
    every = np.concatenate(found).astype(np.float32) / 255
    picked = np.random.default_rng(seed).permutation(len(every))[: rows + queries]
    return _held_out(every[picked], queries, seed)


def _held_out(vectors: Array, queries: int, seed: int) -> tuple[Array, Array]:
    order = np.random.default_rng(seed).permutation(len(vectors))
    return vectors[order[queries:]], vectors[order[:queries]]

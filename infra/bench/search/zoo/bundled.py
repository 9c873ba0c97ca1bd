"""Vectors of real images and texts that come with Python and scikit-learn.

Shapes are (rows, dim), float32.
"""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from workers.vector.kernels.arrays import Array

_LINES = 6  # of a piece of text
_TERMS = 20_000


def digits(queries: int = 200, *, seed: int = 0) -> tuple[Array, Array]:
    """Return the handwritten digits of scikit-learn, 64 dimensions, some held out as queries."""
    from sklearn.datasets import load_digits

    return _held_out(load_digits().data.astype(np.float32), queries, seed)


def patches(rows: int, queries: int, *, seed: int = 0) -> tuple[Array, Array]:
    """Return patches of 8 x 8 pixels from scikit-learn's photographs, 192 dimensions."""
    from sklearn.datasets import load_sample_images

    pieces = []
    view: Any = np.lib.stride_tricks.sliding_window_view  # its types know one axis only
    for image in load_sample_images().images:
        windows = view(image, (8, 8), axis=(0, 1))[::2, ::2]
        pieces.append(windows.reshape(-1, 192))
    every = np.concatenate(pieces).astype(np.float32) / 255
    picked = np.random.default_rng(seed).permutation(len(every))[: rows + queries]
    return _held_out(every[picked], queries, seed)


def _held_out(vectors: Array, queries: int, seed: int) -> tuple[Array, Array]:
    order = np.random.default_rng(seed).permutation(len(vectors))
    return vectors[order[queries:]], vectors[order[:queries]]


def texts(rows: int, queries: int, *, dim: int = 384) -> tuple[Array, Array]:
    """Return vectors of pieces of Python's own library, six lines each, by TF-IDF and SVD."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    pieces: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py")):
        if "site-packages" in path.parts:
            continue
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        pieces += ["\n".join(lines[at : at + _LINES]) for at in range(0, len(lines), _LINES)]
    picked = np.random.default_rng(0).permutation(len(pieces))[: rows + queries]
    counts = TfidfVectorizer(max_features=_TERMS, sublinear_tf=True)
    terms = counts.fit_transform([pieces[i] for i in picked])
    svd = TruncatedSVD(min(dim, len(picked) - 1), n_iter=2, random_state=0)
    return _held_out(svd.fit_transform(terms).astype(np.float32), queries, 0)

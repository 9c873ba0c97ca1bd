"""How functions are compiled for the CPU: the decorators of all kernels, typed.

The only file that imports numba; `distances.py` and `keys.py` write LLVM code through `intrinsic`.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numba.core.cgutils
import numba.extending

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

types: Any = numba.types
insert_function: Any = numba.core.cgutils.get_or_insert_function


# Where kernels are inlined from, or take constants from; numba looks at a kernel's own file itself.
_SHARED = (
    "codes", "compiled", "distances", "fields", "integers", "keys", "lists", "memory", "slots"
)  # fmt: skip
_CALLED = {"workers.search.turns": ("shared", "steps")}  # by the module that calls


@cache
def _sources_digest(module: str) -> str:
    digest = hashlib.sha256()
    for name in (*_SHARED, *_CALLED.get(module, ())):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def kernel(function: AnyFunction) -> AnyFunction:
    """Compiled at the first call, kept on disk, and free of the interpreter's lock."""
    compiled: Any = numba.njit(nogil=True, cache=True)(function)
    # numba's cache looks at one file only, and would keep what it inlined from a changed one
    cached = compiled._cache._cache_file  # noqa: SLF001 - it has no public name
    digest = _sources_digest(function.__module__)
    cached._source_stamp = (*cached._source_stamp, digest)  # noqa: SLF001
    return compiled  # type: ignore[no-any-return]


def inlined(function: AnyFunction) -> AnyFunction:
    """Part of the kernels that call it."""
    compiled: AnyFunction = numba.njit(inline="always")(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function of kernels that is given as LLVM code; callers leave the first argument out."""
    return numba.extending.intrinsic(function)

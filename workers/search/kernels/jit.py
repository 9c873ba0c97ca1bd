"""How functions are compiled for the CPU: the decorators of all kernels, typed.

The only file that imports numba; files that write LLVM code use `intrinsic`. A kernel may call
kernels of its own file and of the rooms `kernels` and `walk`, and nothing else: compiled code is
kept on disk until one of these changes.
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

_SEARCH = Path(__file__).parents[1]


@cache
def sources_digest(search: Path = _SEARCH) -> str:
    """SHA-256 of all that kernels of other files may call, or take constants from."""
    digest = hashlib.sha256((search / "limits.py").read_bytes())
    for room in ("kernels", "walk"):
        for path in sorted((search / room).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel(function: AnyFunction) -> AnyFunction:
    """Compiled at the first call, kept on disk, and free of the interpreter's lock."""
    compiled: Any = numba.njit(nogil=True, cache=True)(function)
    # numba's cache looks at one file only, and would keep what it inlined from a changed one
    cached = compiled._cache._cache_file  # noqa: SLF001 - it has no public name
    cached._source_stamp = (*cached._source_stamp, sources_digest())  # noqa: SLF001
    return compiled  # type: ignore[no-any-return]


def inlined(function: AnyFunction) -> AnyFunction:
    """Part of the kernels that call it."""
    compiled: AnyFunction = numba.njit(inline="always")(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function of kernels that is given as LLVM code; callers leave the first argument out."""
    return numba.extending.intrinsic(function)

"""How functions are compiled for the CPU: the decorators of all kernels, typed.

The only file that imports numba; `distances.py` and `keys.py` write LLVM code through `intrinsic`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numba.core.cgutils
import numba.extending

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

types: Any = numba.types
insert_function: Any = numba.core.cgutils.get_or_insert_function


def kernel(function: AnyFunction) -> AnyFunction:
    """Compiled at the first call, kept on disk, and free of the interpreter's lock."""
    compiled: AnyFunction = numba.njit(nogil=True, cache=True)(function)
    return compiled


def inlined(function: AnyFunction) -> AnyFunction:
    """Part of the kernels that call it."""
    compiled: AnyFunction = numba.njit(inline="always")(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function of kernels that is given as LLVM code; callers leave the first argument out."""
    return numba.extending.intrinsic(function)

"""The decorators that compile kernels for the CPU.

This is the only file that imports numba; files that emit LLVM code use `emitted`. A kernel may call
kernels of its own file and of the packages `kernels` and `traversal`, and nothing else: compiled
code is cached on disk until one of these files changes.
"""

import hashlib
from collections.abc import Callable
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any, TypeVar

import numba
import numba.core.cgutils
import numba.extending

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

types: Any = numba.types
insert_function: Any = numba.core.cgutils.get_or_insert_function
variable: Any = numba.core.cgutils.alloca_once_value  # LLVM moves it from memory to a register
for_slice: Any = numba.core.cgutils.for_range_slice  # a loop from `start` to `stop` by `step`

_VECTOR = Path(__file__).parents[1]


@cache
def sources_digest(root: Path = _VECTOR) -> str:
    """Return the SHA-256 of all files whose kernels and constants other kernels may use."""
    digest = hashlib.sha256((root / "limits.py").read_bytes())
    for folder in ("kernels", "traversal"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel(function: AnyFunction) -> AnyFunction:
    """Compile a function at its first call, cached on disk; it runs without the GIL."""
    compiled: Any = numba.njit(nogil=True, cache=True)(function)
    # numba's cache checks one file only, and would keep code that was inlined from a changed one
    cached = compiled._cache._cache_file  # noqa: SLF001 - it has no public name
    cached._source_stamp = (*cached._source_stamp, sources_digest())  # noqa: SLF001
    return compiled  # type: ignore[no-any-return]


def inlined(function: AnyFunction) -> AnyFunction:
    """Inline a function into the kernels that call it."""
    compiled: AnyFunction = numba.njit(inline="always")(function)
    return compiled


def emitted(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for kernels whose LLVM code the decorated function emits.

    `result` and `parameters` are numba's types. The decorated function is called as
    `write(builder, *values)`, once for each call in a kernel, and returns the LLVM value of the
    result, None if it is void.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        def typed(context: Any, *_arguments: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                written = write(builder, *values)
                return context.get_dummy_value() if written is None else written

            return result(*parameters), generate

        update_wrapper(typed, write)  # numba reads the parameters' names
        return numba.extending.intrinsic(typed)

    return decorate

"""How functions are compiled for the CPU: the decorators of all kernels, typed.

The only file that imports numba; files that write LLVM code use `emitted`. A kernel may call
kernels of its own file and of the rooms `kernels` and `walk`, and nothing else: compiled code is
kept on disk until one of these changes.
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
variable: Any = numba.core.cgutils.alloca_once_value  # in memory until LLVM finds it a register
for_slice: Any = numba.core.cgutils.for_range_slice  # a loop, from `start` to `stop` by `step`

_SEARCH = Path(__file__).parents[1]


@cache
def sources_digest(search: Path = _SEARCH) -> str:
    """SHA-256 of all that kernels of other files may call, or take constants from."""
    digest = hashlib.sha256((search / "limits.py").read_bytes())
    for folder in ("kernels", "walk"):
        for path in sorted((search / folder).glob("*.py")):
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


def emitted(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function of kernels whose LLVM code is written by the one that is decorated.

    `result` and `parameters` are numba's types. The writer is called as `write(builder, *values)`,
    once for each call in a kernel, and returns LLVM's value of the result; None where it is void.
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

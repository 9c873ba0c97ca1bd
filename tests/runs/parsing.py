"""No collection of garbage while Python's syntax trees are built.

An async test's examples leave tasks whose exception nobody asks for (Hypothesis ends an example by
one). When they are collected, asyncio logs a traceback, and writing one parses its lines. Inside
another parse, that made the outer one fail: "AST constructor recursion depth mismatch"
(https://github.com/python/cpython/issues/106905).
"""

import ast
import functools
import gc
from collections.abc import Callable
from typing import Any


def pytest_configure() -> None:
    ast.parse = without_collection(ast.parse)


def without_collection(parse: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, during which no garbage is collected."""

    @functools.wraps(parse)
    def parse_alone(*args: Any, **options: Any) -> Any:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return parse(*args, **options)
        finally:
            if was_enabled:
                gc.enable()

    return parse_alone

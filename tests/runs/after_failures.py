"""What a test that failed leaves open is no fault of the test after it.

A test that is ended in its middle, by its timeout say, closes nothing. Its sockets and coroutines
are garbage later, and their warnings are errors of whichever test runs then: one failure made two.
So they are collected behind the failed test, and say nothing: what is wrong is known already.
"""

import gc
import sys
import warnings
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around all of a test, its teardown too."""
    failed_before = item.session.testsfailed
    result = yield
    if item.session.testsfailed > failed_before:
        _collect_unheard()
    return result


def _collect_unheard() -> None:
    for name in ("last_type", "last_value", "last_traceback"):  # they keep the test's frames
        if hasattr(sys, name):
            delattr(sys, name)
    tells = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        sys.unraisablehook = tells

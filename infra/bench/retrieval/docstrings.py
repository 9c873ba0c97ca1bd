"""Makes a retrieval corpus of the docstrings of Python's standard library.

A document is the docstring of a module, class or function without its first sentence. That sentence
is the question that should find it.
"""

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

CHARS_MIN, CHARS_MAX = 200, 20_000  # of a document
QUESTION_CHARS_MIN, QUESTION_CHARS_MAX = 25, 300
# Importing these opens windows, browsers or terminals, or prints.
_LEFT_OUT = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "test", "tkinter", "lib2to3"}
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'`(])|\n\s*\n")


@dataclass(frozen=True, slots=True)
class DocumentedObject:
    """An object of the standard library, with its docstring as a question and a text."""

    document_id: str
    question: str
    text: str


def corpus() -> list[DocumentedObject]:
    """Return all objects with distinct texts, in order of names; takes some seconds."""
    by_text: dict[str, DocumentedObject] = {}  # aliases have the same text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated modules
        docstrings = list(_docstrings())
    for name, doc in docstrings:
        first, *rest = _SENTENCE.split(inspect.cleandoc(doc), maxsplit=1)
        question, text = " ".join(first.split()), rest[0].strip() if rest else ""
        if not QUESTION_CHARS_MIN <= len(question) <= QUESTION_CHARS_MAX:
            continue
        if CHARS_MIN <= len(text) <= CHARS_MAX:
            by_text.setdefault(text, DocumentedObject(name, question, text))
    return sorted(by_text.values(), key=lambda document: document.document_id)


def _docstrings() -> Iterator[tuple[str, str]]:
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if name.startswith("_"):
            continue
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError):  # a module of another operating system
            continue
        yield from _docstrings_of(module, name)


def _docstrings_of(module: ModuleType, name: str) -> Iterator[tuple[str, str]]:
    if module.__doc__:
        yield name, module.__doc__
    for attribute, value in sorted(vars(module).items()):
        if attribute.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if doc := inspect.getdoc(value):
            yield f"{name}.{attribute}", doc
        if inspect.isclass(value):
            for member, method in sorted(vars(value).items()):
                if not member.startswith("_") and inspect.isroutine(method) and method.__doc__:
                    yield f"{name}.{attribute}.{member}", method.__doc__

"""The house rules for names and docstrings: `tests/test_tidy.py` runs them with its own.

A name says what a thing is. A bare participle, pronoun or quantifier (`found`, `each`, `told`)
says what happened to it, or how many there are, and a reader has to look up the rest.
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.import_graph import PRODUCT, nodes, sources

BARE = frozenset(
    "told said found held kept asked known seen ended given taken sent gone heard wished made left "
    "begun done drawn wanted named shown grown spent owed lent lost each other others one mine "
    "theirs own more most least aside again alike anew underway past overdue stolen whoever "
    "nobody".split()
)
GERUNDS = frozenset(
    "asking tending lending weighing dealing judging sending telling saying keeping going waiting "
    "hearing taking giving seeing wishing wanting owing".split()
)
# Bare names that are known outside, by file: settings, options, keys of JSON, fields of records.
KNOWN_OUTSIDE = {
    "infra/cli/measure/plan_pools.py": 1,  # --found
    "streams/log/admin.py": 1,  # trivium topics describe --json
    "streams/log/dead_letters.py": 4,  # trivium dlq retry --json
}
DOCSTRING_WORDS_MIN = 5

Findings = Iterator[str]


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every argument, assigned name, attribute and function."""
    for node in nodes(tree):
        match node:
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name


def bare_names(tree: ast.Module) -> list[tuple[int, str]]:
    """Those of the bound names that say nothing."""
    return [(line, name) for line, name in bound_names(tree) if name.strip("_") in BARE]


def names_say_what_things_are() -> Findings:
    for path, tree in sources():
        bare = bare_names(tree)
        if len(bare) > KNOWN_OUTSIDE.get(path, 0):
            yield from (f"{path}:{line}: {name} does not say what it is" for line, name in bare)


def bare_names_that_stay_are_counted() -> Findings:
    """A file with fewer of them than it may have gets a lower number."""
    trees = dict(sources(*PRODUCT))
    for path, expected in KNOWN_OUTSIDE.items():
        count = len(bare_names(trees[path]))
        if count < expected:
            yield f"{path}: {count} bare names, KNOWN_OUTSIDE says {expected}"


def modules_are_named_by_what_they_hold() -> Findings:
    for path, _ in sources():
        if Path(path).stem.strip("_") in BARE | GERUNDS:
            yield f"{path}: expected a noun"


def one_class_name_has_one_place() -> Findings:
    places = defaultdict(list)
    for path, tree in sources(*PRODUCT):
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, lines in sorted(places.items()):
        if len(lines) > 1:
            yield f"{name}: {', '.join(lines)}"


def docstrings_are_sentences() -> Findings:
    for path, tree in sources(*PRODUCT):
        for node in nodes(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                words = (ast.get_docstring(node) or "").split()
                if 0 < len(words) < DOCSTRING_WORDS_MIN:
                    yield f"{path}:{node.lineno}: {' '.join(words)!r} needs a verb and an object"


RULES: tuple[Callable[[], Findings], ...] = (
    names_say_what_things_are,
    bare_names_that_stay_are_counted,
    modules_are_named_by_what_they_hold,
    one_class_name_has_one_place,
    docstrings_are_sentences,
)

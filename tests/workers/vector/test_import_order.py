"""The rooms of the search worker: imports run one way between them, and in no circle within."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import workers.vector

SEARCH = Path(workers.vector.__file__).parent
ROOMS = (
    "kernels",
    "walk",
    "graph",
    "metadata",
    "index",
    "words",
    "cuda",
    "engine",
    "service",
)  # each sees those before


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports anywhere, as paths without suffix: `walk/steps`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("workers.vector."):
            place = "/".join((node.module or "").split(".")[2:])
            for alias in node.names:
                whole = f"{place}/{alias.name}"
                yield whole if (SEARCH / f"{whole}.py").exists() else place


def modules() -> dict[str, set[str]]:
    paths = [path for path in SEARCH.rglob("*.py") if path.name != "__init__.py"]
    return {path.relative_to(SEARCH).as_posix()[:-3]: set(imports(path)) for path in paths}


def rank(module: str) -> int:
    """Where its room stands; what lies beside the rooms is below them all."""
    room, slash, _ = module.partition("/")
    return ROOMS.index(room) if slash else -1


def test_imports_run_one_way_between_packages() -> None:
    pairs = ((module, imported) for module, used in modules().items() for imported in used)
    assert [(module, imported) for module, imported in pairs if rank(imported) > rank(module)] == []


def test_modules_have_no_import_cycles() -> None:
    try:
        TopologicalSorter(modules()).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None

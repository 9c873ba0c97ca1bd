"""Compiled code that is kept on disk goes when something that it was made of changes."""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import workers.search
from workers.search.kernels.jit import sources_digest

SEARCH = Path(workers.search.__file__).parent
KEPT = ("workers.search.kernels", "workers.search.walk")


@pytest.mark.parametrize("name", ["kernels/distances.py", "walk/steps.py", "limits.py"])
def test_a_change_of_what_kernels_are_made_of_is_noticed(tmp_path: Path, name: str) -> None:
    for room in ("kernels", "walk"):
        shutil.copytree(
            SEARCH / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(SEARCH / "limits.py", tmp_path)
    assert sources_digest(tmp_path) == sources_digest()
    sources_digest.cache_clear()
    changed = tmp_path / name
    changed.write_text(changed.read_text() + "\n")
    assert sources_digest(tmp_path) != sources_digest()


def kernels_of(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            if {ast.unparse(each) for each in node.decorator_list} & {"kernel", "inlined"}:
                yield node


def test_kernels_use_their_own_file_and_what_is_looked_at() -> None:
    """Else a change elsewhere would leave compiled code of before in use."""
    found = []
    for path in SEARCH.rglob("*.py"):
        tree, homes = ast.parse(path.read_text()), dict[str, str]()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("workers."):
                for each in node.names:
                    homes[each.asname or each.name] = f"{node.module}.{each.name}"
        for function in kernels_of(tree):
            names = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)}
            used = {homes[name] for name in names if name in homes}
            found += [(path.name, each) for each in used if not each.startswith(KEPT)]
    assert found == []

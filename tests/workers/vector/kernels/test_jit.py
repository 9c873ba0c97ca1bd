"""Compiled code that is kept on disk goes when something that it was made of changes."""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import workers.vector
from workers.vector.kernels.jit import sources_digest

VECTOR = Path(workers.vector.__file__).parent
KEPT = ("workers.vector.kernels", "workers.vector.traversal")


@pytest.mark.parametrize("name", ["kernels/distances.py", "traversal/steps.py", "limits.py"])
def test_sources_digest_changes_with_kernel_sources(tmp_path: Path, name: str) -> None:
    for room in ("kernels", "traversal"):
        shutil.copytree(
            VECTOR / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(VECTOR / "limits.py", tmp_path)
    assert sources_digest(tmp_path) == sources_digest()
    sources_digest.cache_clear()
    changed = tmp_path / name
    changed.write_text(changed.read_text() + "\n")
    assert sources_digest(tmp_path) != sources_digest()


def kernels_of(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            if {ast.unparse(decorator) for decorator in node.decorator_list} & {
                "kernel",
                "inlined",
            }:
                yield node


def test_kernels_use_only_digested_modules() -> None:
    """Otherwise a change elsewhere would leave old compiled code in use."""
    foreign_names = []
    for path in VECTOR.rglob("*.py"):
        tree, homes = ast.parse(path.read_text()), dict[str, str]()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("workers."):
                for alias in node.names:
                    homes[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for function in kernels_of(tree):
            names = {child.id for child in ast.walk(function) if isinstance(child, ast.Name)}
            used = {homes[name] for name in names if name in homes}
            foreign_names += [(path.name, home) for home in used if not home.startswith(KEPT)]
    assert foreign_names == []

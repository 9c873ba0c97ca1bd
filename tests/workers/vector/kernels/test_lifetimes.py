"""No kernel uses an array by its address alone: numba frees arrays after their last use by name.

Lists of few rows were built in memory that another thread had been given meanwhile.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import workers.vector

ROOT = Path(workers.vector.__file__).parent
MAKERS = {"empty", "zeros", "full", "ones", "arange", "empty_like", "zeros_like"}
Loops = tuple[ast.AST, ...]


def visited(node: ast.AST, loops: Loops = ()) -> Iterator[tuple[ast.AST, Loops, ast.AST]]:
    """Nodes below one, with the loops around and the parent of each."""
    for child in ast.iter_child_nodes(node):
        yield child, loops, node
        yield from visited(
            child, (*loops, child) if isinstance(child, ast.For | ast.While) else loops
        )


def is_address(parent: ast.AST) -> bool:
    return isinstance(parent, ast.Call) and ast.unparse(parent.func) == "address"


def made_in(function: ast.FunctionDef) -> dict[str, Loops]:
    """Arrays that a function makes, and in which loops."""
    arrays: dict[str, Loops] = {}
    for node, loops, _ in visited(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for name, value in zip(names, values, strict=False):
                maker = value.func if isinstance(value, ast.Call) else None
                if isinstance(maker, ast.Attribute) and maker.attr in MAKERS:
                    arrays[ast.unparse(name)] = loops
    return arrays


def freed_early(text: str) -> list[str]:
    """Arrays of kernels whose last use is that their address is taken, in no loop of its own."""
    early_frees = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
            continue
        last: dict[str, tuple[int, int, Loops, ast.AST]] = {}
        for node, loops, parent in visited(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                here = (node.lineno, node.col_offset, loops, parent)
                last[node.id] = max(last.get(node.id, here), here, key=lambda use: use[:2])
        for name, maker_loops in made_in(function).items():
            if (
                name in last
                and is_address(last[name][3])
                and len(last[name][2]) <= len(maker_loops)
            ):
                early_frees.append(f"{function.name}: {name}")
    return early_frees


def test_lifetime_check_finds_early_free() -> None:
    wrong = "@kernel\ndef f(n):\n    room = np.empty(9)\n    out = address(room)\n"
    assert freed_early(wrong + "    for i in range(n):\n        put(out, i)\n") == ["f: room"]
    right = "@kernel\ndef f(n):\n    room = np.empty(9)\n    for i in range(n):\n"
    assert freed_early(right + "        put(address(room), i)\n") == []
    assert freed_early(right + "        far = np.zeros(n)\n        put(address(far))\n") == [
        "f: far"
    ]


def test_kernel_arrays_outlive_their_addresses() -> None:
    problems = [
        f"{path.relative_to(ROOT)}: {early_free}"
        for path in sorted(ROOT.rglob("*.py"))
        for early_free in freed_early(path.read_text())
    ]
    assert not problems, problems

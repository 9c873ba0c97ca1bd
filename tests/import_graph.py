"""The project's files and their syntax trees; which modules import which, and circles among them.

The graph is of the same kind for modules and for folders.
"""

import ast
import gc
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PRODUCT = ("schemas", "streams", "workers", "infra")
FOLDERS = (*PRODUCT, "tests")
Tree = tuple[str, ast.Module]
Graph = dict[str, set[str]]


@cache
def tracked() -> tuple[Path, ...]:
    """Every file that git knows or would add; without git, everything in our folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        below = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))
        return (*ROOT.glob("*.*"), *below)
    return tuple(p for name in listed.stdout.splitlines() if (p := ROOT / name).is_file())


@cache
def all_sources() -> tuple[Tree, ...]:
    """Name and tree of each Python file, read once for all rules."""
    paths = sorted(path for path in tracked() if path.suffix == ".py")
    gc.disable()  # it would look at all trees again and again, and they stay
    try:
        return tuple(
            (path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
            for path in paths
        )
    finally:
        gc.enable()


@cache
def sources(*folders: str) -> tuple[Tree, ...]:
    """Those under the folders."""
    starts = tuple(f"{folder}/" for folder in folders or FOLDERS)
    return tuple((name, tree) for name, tree in all_sources() if name.startswith(starts))


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a file, collected once for all rules."""
    return tuple(ast.walk(tree))


def modules_of(files: Iterable[Tree]) -> Graph:
    """Each module, such as `infra/stack/plan`, and what it imports anywhere, if only for types.

    Takes names and trees of files, and leaves out imports of anything else.
    """
    trees = {name.removesuffix(".py"): tree for name, tree in files}
    graph: Graph = {name: set() for name in trees}
    for name, tree in trees.items():
        graph[name] |= {target for target in _targets(tree) if target in trees and target != name}
    return graph


def _targets(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.replace(".", "/") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            place = node.module.replace(".", "/")
            yield place
            yield from (f"{place}/{alias.name}" for alias in node.names)


def entries_of(graph: Mapping[str, set[str]], folder: str) -> Graph:
    """Merge the graph to a folder's entries: its modules, and its folders taken whole."""
    entries: Graph = defaultdict(set)
    for name, imported in graph.items():
        if (entry := _entry(name, folder)) is not None:
            targets = {_entry(target, folder) for target in imported} - {None, entry}
            entries[entry] |= {target for target in targets if target is not None}
    return dict(entries)


def _entry(name: str, folder: str) -> str | None:
    prefix = f"{folder}/" if folder else ""
    return name.removeprefix(prefix).partition("/")[0] if name.startswith(prefix) else None


def folders_of(graph: Mapping[str, set[str]]) -> list[str]:
    """Every folder that has a module somewhere below it; the empty name is the top."""
    parents = {str(parent) for name in graph for parent in PurePosixPath(name).parents}
    return sorted("" if name == "." else name for name in parents)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups in which everyone reaches everyone, each in order of name.

    What reaches itself does so through a circle; two of one circle reach the same.
    """
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        reached = {name: _reached(graph, name) for name in graph}
    else:
        return []
    circle_by_first: dict[str, list[str]] = {}
    for name in sorted(graph):
        if name in reached[name]:
            group = [candidate for candidate in sorted(graph) if candidate in reached[name]]
            ring = [member for member in group if name in reached[member]]
            circle_by_first.setdefault(ring[0], ring)
    return list(circle_by_first.values())


def _reached(graph: Mapping[str, set[str]], name: str) -> set[str]:
    names: set[str] = set()
    waiting = [name]
    while waiting:
        for target in graph.get(waiting.pop(), ()):
            if target not in names:
                names.add(target)
                waiting.append(target)
    return names


def longest_chain(graph: Mapping[str, set[str]], folder: str) -> list[str]:
    """The longest way from a module of the folder down its imports within the folder.

    As many modules as the folder has floors. A module that imports itself, over whichever way, ends
    the chain; `circles` finds those.
    """
    inside = {name for name in graph if name.startswith(f"{folder}/")}
    chain_by_name: dict[str, list[str]] = {}

    def chain(name: str, above: tuple[str, ...]) -> list[str]:
        if name not in chain_by_name:
            below = (graph[name] & inside).difference(above, {name})
            chains = [chain(target, (*above, name)) for target in sorted(below)]
            chain_by_name[name] = [name, *max(chains, key=len, default=[])]
        return chain_by_name[name]

    return max((chain(name, ()) for name in sorted(inside)), key=len, default=[])

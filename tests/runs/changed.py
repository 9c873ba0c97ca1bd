"""Which tests a change can reach by imports: `make test-changed`.

    python -m tests.runs.changed           # what differs from the last commit; else what that did
    python -m tests.runs.changed main      # what differs from where a branch began

Prints test files, one a line. Besides importers, the tests in the folder that mirrors a module's
count: commands are imported by name. A file that is no module counts as all modules of the nearest
folder that has some, and a `conftest.py` as all tests below it, but for that of `tests/`, which
nearly every test uses. Whole stacks, real engines and fuzzing are left out; `make test` and
`make test-all` run those.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from tests.import_graph import Graph, modules_of

ROOT = Path(__file__).parents[2]
FIXTURES = "tests/conftest"
LARGE = ("tests/e2e/", "tests/fuzz/")


def changed_files(base: str) -> list[str]:
    """Paths that differ from a commit, new ones, too; of a clean tree those of its last commit."""
    if base:
        (common,) = _git("merge-base", base, "HEAD")
        return _git("diff", "--name-only", common) + _new_files()
    return _git("diff", "--name-only", "HEAD") + _new_files() or _git(
        "diff", "--name-only", "HEAD~1"
    )


def _new_files() -> list[str]:
    return _git("ls-files", "--others", "--exclude-standard")


def _git(*command: str) -> list[str]:
    result = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"git {' '.join(command)}: {result.stderr.strip()}")
    return result.stdout.splitlines()


def import_graph() -> Graph:
    """Of all modules that git knows or would add."""
    names = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    paths = [(name, ROOT / name) for name in names]
    return modules_of((name, ast.parse(path.read_text())) for name, path in paths if path.exists())


def changed_modules(paths: Iterable[str], graph: Graph) -> set[str]:
    """The modules of the paths; for a path that is none, those of the nearest folder with some."""
    modules = set()
    for path in paths:
        if path.endswith(".py"):
            modules.add(path.removesuffix(".py"))
            continue
        for parent in [str(parent) for parent in PurePosixPath(path).parents][:-1]:  # not the top
            if inside := {name for name in graph if name.startswith(f"{parent}/")}:
                modules |= inside
                break
    return modules


def reached_tests(graph: Graph, modules: Collection[str]) -> list[str]:
    """Files of tests that import one of the modules, over however many others; nearest first."""
    importers: Graph = defaultdict(set)
    for name, targets in graph.items():
        for target in targets if name != FIXTURES else ():
            importers[target].add(name)
    waiting = sorted({*modules, *_beside(graph, modules)})
    for name in waiting:  # grows meanwhile
        waiting += sorted(importers[name] - {*waiting})
    tests = [name for name in waiting if name in graph and _is_test(name)]
    return [f"{name}.py" for name in tests if not (name.startswith(LARGE) or "vllm" in name)]


def _beside(graph: Graph, modules: Collection[str]) -> set[str]:
    """Tests of the folders that mirror those of the modules, and those below a `conftest.py`."""
    mirrors = {f"tests/{PurePosixPath(name).parent}" for name in modules}
    below = [name.removesuffix("conftest") for name in modules if name.endswith("/conftest")]
    roots = tuple(root for root in below if root != "tests/")
    tests = filter(_is_test, graph)
    return {n for n in tests if str(PurePosixPath(n).parent) in mirrors or n.startswith(roots)}


def _is_test(name: str) -> bool:
    return name.startswith("tests/") and PurePosixPath(name).name.startswith("test_")


def main() -> None:
    """Print what is to be run; what was looked at goes to standard error."""
    graph = import_graph()
    modules = changed_modules(changed_files("".join(sys.argv[1:])), graph)
    tests = reached_tests(graph, modules)
    print(*tests, sep="\n")
    alone = [name for name in sorted(modules) if not reached_tests(graph, [name])]
    for name in alone:
        print(f"no test of `make test-changed` reaches {name}: `make test`", file=sys.stderr)
    print(f"{len(modules)} modules changed, {len(tests)} files of tests reached", file=sys.stderr)


if __name__ == "__main__":
    main()

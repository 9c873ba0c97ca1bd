"""Which tests a change can reach by imports: `make test-changed`.

    python -m tests.changed           # what differs from the last commit; else what that changed
    python -m tests.changed main      # what differs from a branch, tag or commit

Prints test files, one a line, those nearest to the change first. A file that is no module counts as
the modules beside it. Fixtures of `tests/conftest.py` are not followed: nearly every test uses one.
Whole stacks, real engines and fuzzing are left out, unless they changed themselves; `make test`
runs those.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from tests.import_graph import Graph, modules_of

ROOT = Path(__file__).parents[1]
FIXTURES = "tests/conftest"
LARGE = ("tests/e2e/", "tests/fuzz/")


def changed_files(base: str) -> list[str]:
    """Paths that differ from a commit, new ones, too; of a clean tree those of its last commit."""
    if base:
        return _git("diff", "--name-only", base) + _new_files()
    return _git("diff", "--name-only", "HEAD") + _new_files() or _git(
        "diff", "--name-only", "HEAD~1"
    )


def _new_files() -> list[str]:
    return _git("ls-files", "--others", "--exclude-standard")


def _git(*command: str) -> list[str]:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def import_graph() -> Graph:
    """Of all modules that git knows or would add."""
    names = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    paths = [(name, ROOT / name) for name in names]
    return modules_of((name, ast.parse(path.read_text())) for name, path in paths if path.exists())


def changed_modules(paths: Iterable[str], graph: Graph) -> set[str]:
    """The modules of the paths; for a path that is none, the modules of its folder."""
    modules = set()
    for path in paths:
        folder = f"{PurePosixPath(path).parent}/"
        if path.endswith(".py"):
            modules.add(path.removesuffix(".py"))
        else:  # nothing of ours lies at the top
            modules |= {name for name in graph if name.startswith(folder)}
    return modules


def reached_tests(graph: Graph, modules: Collection[str]) -> list[str]:
    """Files of tests that import one of the modules, over however many others; nearest first."""
    importers: Graph = defaultdict(set)
    for name, targets in graph.items():
        for target in targets if name != FIXTURES else ():
            importers[target].add(name)
    waiting = sorted(modules)
    for name in waiting:  # grows meanwhile
        waiting += sorted(importers[name] - {*waiting})
    tests = [name for name in waiting if PurePosixPath(name).name.startswith("test_")]
    return [f"{name}.py" for name in tests if name in graph and _is_run(name, modules)]


def _is_run(test: str, modules: Collection[str]) -> bool:
    return test in modules or not (test.startswith(LARGE) or "vllm" in test)


def main() -> None:
    """Print what is to be run; what was looked at goes to standard error."""
    graph = import_graph()
    modules = changed_modules(changed_files("".join(sys.argv[1:])), graph)
    tests = reached_tests(graph, modules)
    print(*tests, sep="\n")
    if FIXTURES in modules:
        print("tests/conftest.py changed, which concerns all tests: `make test`", file=sys.stderr)
    print(f"{len(modules)} modules changed, {len(tests)} files of tests reached", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Small changes of the code, each of which some test should notice: `make mutants`.

    python -m tests.runs.mutants                         # goes on where the last run stopped
    python -m tests.runs.mutants streams/core/router.py streams/bridge     # only there
    python -m tests.runs.mutants --again streams/bridge  # what survived there, too
    python -m tests.runs.mutants --report                # only counts what there is

mutmut makes the mutants and runs them, each area in a copy of the tree of its own, below
`build/mutants`. It notes which tests call a function, and only those can notice its mutants. As a
plugin of pytest this module has those of the mirror file and folder run first, quick ones before
slow ones. `mutants.json` beside this module has what all runs have found.
"""

import argparse
import difflib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/mutants"
RESULTS = Path(__file__).with_name("mutants.json")
FOLDERS = ("schemas", "streams", "workers", "infra", "tests")
AREAS = {  # folders whose code is changed, and the tests that may notice
    "streams/core": ["tests/streams/core"],
    "streams/bridge": ["tests/streams/bridge"],
    "streams/calls/stream": [
        *("tests/streams/calls/stream", "tests/streams/calls/log"),
        "tests/streams/gateway/test_state.py",
    ],
    "workers/llm": ["tests/workers/llm"],
}
LEFT_OUT = {
    "workers/llm/vllm/*": "its tests start engines of vLLM, minutes for each mutant",
    "streams/bridge/log_reader.py": "its tests need a broker",
    "streams/bridge/process.py": "its tests start whole bridges",
    "properties and other decorated functions": "mutmut changes none",
    "constants of modules and classes": "mutmut changes functions alone",
    "calls of `log`": "text for people",
}
# Random runs of a whole router, and whole engines: a minute for each mutant that nothing notices.
LONG_TESTS = ["tests/streams/core/test_router_random.py", "tests/workers/llm/vllm"]
TESTS = "not kafka and not docker and not vllm and not gpu and not slow and not platform"
TIMEOUT_S, TIMEOUT_TIMES = 10.0, 1.5  # a mutant may take (what its tests take + so long) * so often
KILLED, TOO_SLOW, SURVIVED, NO_TEST, NOT_RUN, EQUIVALENT = (
    *("killed", "too slow", "survived", "no test", "not run", "equivalent"),
)
STATES = {None: NOT_RUN, 0: SURVIVED, 1: KILLED, 3: KILLED, 5: NO_TEST, 33: NO_TEST}
STATES |= dict.fromkeys((-24, 24, 36, 152, 255), TOO_SLOW)


class Mutant(NamedTuple):
    """One change of one function."""

    key: str  # mutmut's name
    path: str
    state: str


class Area:
    """One folder whose code is changed, in a copy of the tree of its own."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._home = BUILD / folder.replace("/", "-")
        self._copy = self._home / "mutants"

    def run(self, paths: Collection[str], processes: int, *, rerun_survivors: bool) -> int:
        """Have mutmut run what lies there; the whole area where there are no paths. Returns its
        exit status."""
        self._prepare()
        names = [
            name for path in paths for name in self._to_run(path, rerun_survivors=rerun_survivors)
        ]
        if paths and not names:
            return 0
        command = [str(Path(sys.executable).with_name("mutmut")), "run"]
        command += ["--max-children", str(processes), *names]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return subprocess.run(command, cwd=self._home, env=environment).returncode

    def _prepare(self) -> None:
        """What mutmut finds where it starts: the tree, and its settings."""
        self._home.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            link = self._home / name
            if not link.is_symlink():
                link.symlink_to(ROOT / name)
        settings: dict[str, Any] = {
            "source_paths": [self._folder],
            "also_copy": [*_around(self._folder)],
            "do_not_mutate": [name for name in LEFT_OUT if "/" in name],
            "do_not_mutate_patterns": [r"\blog\.\w+\(", r"raise AssertionError"],
            "pytest_add_cli_args": [
                *("-p", "tests.runs.mutants", "-m", TESTS),
                *(f"--ignore={path}" for path in LONG_TESTS),
            ],
            "pytest_add_cli_args_test_selection": AREAS[self._folder],
            "process_isolation": "forkserver",  # tests leave threads behind
            "on_dependency_change": "ignore",
            "timeout_constant": TIMEOUT_S,
            "timeout_multiplier": TIMEOUT_TIMES,
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        text = (ROOT / "pyproject.toml").read_text() + "\n".join(["\n[tool.mutmut]", *lines, ""])
        (self._home / "pyproject.toml").write_text(text)

    def _to_run(self, path: str, *, rerun_survivors: bool) -> Iterator[str]:
        """Names of mutants, or a pattern for those of a module that are not made yet."""
        target_states = {NOT_RUN, SURVIVED, NO_TEST} if rerun_survivors else {NOT_RUN}
        folder = ROOT / path
        for module in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            source, mutated_copy = module.relative_to(ROOT), self._copy / module.relative_to(ROOT)
            if not mutated_copy.exists() or mutated_copy.stat().st_mtime <= module.stat().st_mtime:
                yield f"{'.'.join(source.with_suffix('').parts)}.*"
            else:
                yield from (m.key for m in self._mutants_of(source) if m.state in target_states)

    def mutants(self) -> Iterator[Mutant]:
        """All that were made, in the order of the code."""
        for module in sorted((ROOT / self._folder).rglob("*.py")):
            yield from self._mutants_of(module.relative_to(ROOT))

    def _mutants_of(self, source: Path) -> Iterator[Mutant]:
        notes = self._copy / f"{source}.meta"
        if notes.exists():
            for key, status in json.loads(notes.read_text())["exit_code_by_key"].items():
                yield Mutant(key, str(source), STATES.get(status, f"exit status {status}"))

    def change(self, mutant: Mutant) -> str:
        """What it changes, as `FUNCTION: - FORMER LINE + LINE`."""
        name = mutant.key.rpartition(".")[2]
        stem = name.rpartition("__mutmut_")[0]
        function = stem.replace("xǁ", "").replace("ǁ", ".").removeprefix("x_")
        former, later = (
            [
                line.strip().replace(variant, function)
                for line in self._function(mutant.path, variant)
            ]
            for variant in (f"{stem}__mutmut_orig", name)
        )
        lines = list(difflib.unified_diff(former, later, n=0, lineterm=""))[2:]
        changes = [f"{line[0]} {line[1:]}" for line in lines if not line.startswith("@@")]
        return f"{function}: {' '.join(changes)}"

    def _function(self, path: str, name: str) -> list[str]:
        first, last = _json(self._copy / f"{path}.spans")["spans"][name]
        return _lines(self._copy / path)[first - 1 : last]


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@cache
def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _around(folder: str) -> Iterator[str]:
    """All that lies beside a folder, as few names as can be."""
    parts = Path(folder).parts
    yield from (name for name in FOLDERS if name not in (parts[0], "tests"))
    for depth in range(1, len(parts)):
        inside = Path(*parts[:depth])
        for path in sorted((ROOT / inside).iterdir()):
            if path.name not in (parts[depth], "__pycache__"):
                yield str(path.relative_to(ROOT))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is nearest to the mutant that runs now, and of that what is quickest, runs first."""
    *folders, name = os.environ.get("MUTANT_UNDER_TEST", "").split(".")[:-1] or [""]
    notes = Path("mutmut-stats.json")
    if not folders or not notes.exists():
        return
    times_s: dict[str, float] = json.loads(notes.read_text())["duration_by_test"]
    mirror = Path("tests", *folders).resolve()

    def turn(item: pytest.Item) -> tuple[bool, bool, float]:
        is_own = item.path.name.startswith(f"test_{name}")
        return not is_own, item.path.parent != mirror, times_s.get(item.nodeid, 0.0)

    items.sort(key=turn)


def report() -> dict[str, Any]:
    """Figures of all files, and what survives; what was called equivalent by hand stays so."""
    by_hand: dict[str, str] = _json(RESULTS)["equivalent"] if RESULTS.exists() else {}
    files: dict[str, Counter[str]] = {}
    survivors: dict[str, list[str]] = {}
    for area in map(Area, AREAS):
        for mutant in area.mutants():
            state = mutant.state
            if state in (SURVIVED, NO_TEST):
                change = area.change(mutant)
                if f"{mutant.path} {change}" in by_hand:
                    state = EQUIVALENT
                else:
                    survivors.setdefault(mutant.path, []).append(change)
            files.setdefault(mutant.path, Counter())[state] += 1
    total = sum(files.values(), Counter[str]())
    return {
        "score": score(total),
        "total": total,
        "left out": LEFT_OUT,
        "files": {path: {"score": score(of), **of} for path, of in files.items()},
        "survivors": survivors,
        "equivalent": by_hand,
    }


def score(states: Counter[str]) -> float | None:
    """Per cent that some test notices, of those that ran and are not equivalent."""
    noticed = states[KILLED] + states[TOO_SLOW]
    ran = states.total() - states[NOT_RUN] - states[EQUIVALENT]
    return round(100 * noticed / ran, 1) if ran else None


def main() -> None:
    """Run, and write what all runs so far have found."""
    parser = argparse.ArgumentParser(description="Changes that tests should notice.")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run survivors again")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("paths", nargs="*")
    options = parser.parse_args()
    paths = [Path(path).resolve().relative_to(ROOT) for path in options.paths or AREAS]
    for folder in AREAS if not options.report else ():
        inside = [str(path) for path in paths if path.is_relative_to(folder)]
        inside += [folder for path in paths if path in Path(folder).parents]
        if inside and (
            status := Area(folder).run(inside, options.processes, rerun_survivors=options.again)
        ):
            sys.exit(status)
    findings = report()
    RESULTS.write_text(json.dumps(findings, indent=1, ensure_ascii=False) + "\n")
    print(f"{findings['score']} % noticed, of {dict(findings['total'])}: {RESULTS}")


if __name__ == "__main__":
    main()

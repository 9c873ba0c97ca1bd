"""The house rules, as tests: each collects every place that breaks one rule and expects none.

Reads the source with `ast`; imports nothing of what it judges. Each line names file and line.
"""

import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest

from tests import tidy_names, tidy_pages
from tests.import_graph import (
    FOLDERS,
    PRODUCT,
    ROOT,
    circles,
    entries_of,
    folders_of,
    longest_chain,
    modules_of,
    nodes,
    sources,
    tracked,
)
from tests.waits import PATIENCE_S

MAY_IMPORT = {  # by folder; the first that a file is in
    "schemas": {"schemas"},
    "streams/log": {"schemas", "streams/log"},
    "streams": {"schemas", "streams"},
    "workers/vector": {  # a library
        "schemas/errors",
        "schemas/rules/filters",
        "schemas/rules/letters",
        "schemas/rules/metadata",
        "schemas/sections",
        "workers/vector",
    },
    "workers": {"schemas", "streams/log", "workers"},
    "infra": {"schemas", "streams", "workers", "infra"},
}

# The core decides; whatever waits, reads a clock, draws, or talks belongs to its callers.
IMPURE_MODULES = set(
    "asyncio time datetime random secrets uuid os sys logging socket threading subprocess pathlib "
    "aiokafka faust mode".split()
)
IMPURE_CALLS = {"print", "open", "input", "id", "hash"}
# Each is imported where it is used for real, and by as few files as possible.
HEAVY = {
    "torch": {"workers/embed/embedders/sentence"},
    "vllm": {"workers/llm/vllm/", "workers/llm/parsing/vllm_parser"},
    "nixl": {"workers/kv"},
    "nixl_cu12": set(),
    "cupy": {"workers/vector/cuda/launch"},
    "cuvs": {"workers/vector/cuda/cuvs_graph"},
    "faust": {"streams/log/faust/library"},
    "transformers": {"workers/models/conversion", "workers/embed/embedders/sentence"},
    "xgrammar": {"workers/llm/sim/forms/tags"},  # imports torch; only structural tags need it
}
HEAVY_FILES_MAX = {
    "vllm": 5,
    "transformers": 2,
}  # too much for one file; of the others one each

FOLDER_MODULES_MAX = 15
CORE_FLOORS_MAX = 6
FUNCTION_LINES_MAX, FILE_LINES_USUAL = 70, 250
FILE_LINES_MAX, TEST_LINES_MAX = 500, 500
LONGER_SHARE_MAX = 0.15  # of files above the usual length
DOCSTRING_LINES_MAX = 12
THEORY = "Theory of operation"  # the few modules that carry one may say more
POLLING_FILES = {"tests/waits.py"}  # where tests wait for a condition
# Clients of real processes that pause between two calls; nothing is judged by how long.
PAUSING_FILES = {
    "tests/e2e/test_pools.py",
    "tests/e2e/scaling/test_retrieval.py",
    "tests/workers/retrieval/test_worker_replicas.py",
}
BOUNDS = {"timeout", "timeout_s"}  # of any call
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
TIMEOUT_S = SETTINGS["timeout"]  # of a test without a mark
HTTP_CALLS = {f"httpx.{name}" for name in ("AsyncClient", "Client", "get", "post", "stream")}
WAITS = {"asyncio.timeout", "asyncio.wait_for", "until", "run", "stack"}
CLOCKS = set("time.monotonic time.perf_counter time.time time.time_ns wall_ms loop.time".split())
CLOCKS |= {"?.time"}  # of `asyncio.get_running_loop()`
TIMING_FILES = {
    "tests/infra/bench/search/parts/test_lateness.py": "how long a process stood still, at least",
    "tests/streams/agents/test_lifecycle.py": "for tests on virtual time",
    "tests/workers/llm/sim/test_engine.py": "for tests on virtual time",
    "tests/workers/processes.py": "the share of a core that was used, whatever the time",
    "tests/workers/vector/engine/host_time.py": "a benchmark",
}
UNFINISHED = "FIX" + "ME"

# Names of places that mean nothing on another machine, put together so that this file passes.
PLACES = re.compile(
    "|".join(
        [
            r"\bpypi" + r"\.org",
            "python" + "hosted",
            r"repo1?\." + "maven",
            "artifact" + "ory",
            r"(?<![\w.}])/(work|root|opt/wheels)" + "/",
            r"(?<![\w.}])/home" + r"/\w+/",
            r"/tmp" + "/w/",
        ]
    )
)

Findings = Iterator[str]


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of every module imported anywhere in the file."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def called(node: ast.AST) -> str:
    """`asyncio.sleep` for a call of it; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    names, part = list[str](), node.func
    while isinstance(part, ast.Attribute):
        names, part = [part.attr, *names], part.value
    return ".".join([part.id if isinstance(part, ast.Name) else "?", *names])


def imports_point_downward() -> Findings:
    for name, tree in sources(*PRODUCT):
        allowed = next(MAY_IMPORT[folder] for folder in MAY_IMPORT if name.startswith(f"{folder}/"))
        for line, module in imports(tree):
            path = module.replace(".", "/")
            if path.partition("/")[0] in FOLDERS and not any(
                path == folder or path.startswith(f"{folder}/") for folder in allowed
            ):
                yield f"{name}:{line}: imports {module}"


def research_serves_nobody() -> Findings:
    """Evaluations of papers may break without a user who notices: nothing is built on them."""
    for name, tree in sources(*PRODUCT):
        if name.startswith(("infra/research/", "infra/cli/measure/evaluate")):
            continue
        for line, module in imports(tree):
            if module.startswith("infra.research"):
                yield f"{name}:{line}: imports {module}"


def imports_are_absolute() -> Findings:
    for name, tree in sources():
        for line, module in imports(tree):
            if module.startswith("."):
                yield f"{name}:{line}: relative import"


def packages_are_empty() -> Findings:
    for path in tracked():
        if path.name == "__init__.py" and path.stat().st_size:
            yield f"{path.relative_to(ROOT)}: not empty"


def the_core_is_pure() -> Findings:
    for name, tree in sources("streams/core"):
        for line, module in imports(tree):
            if module.partition(".")[0] in IMPURE_MODULES:
                yield f"{name}:{line}: imports {module}"
        for node in nodes(tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
                yield f"{name}:{node.lineno}: is asynchronous"
            elif called(node) in IMPURE_CALLS:
                yield f"{name}:{node.lineno}: calls {called(node)}"  # type: ignore[attr-defined]  # a Call


def heavy_packages_have_one_importer() -> Findings:
    importers: dict[str, set[str]] = defaultdict(set)
    for name, tree in sources(*PRODUCT):
        for _line, module in imports(tree):
            if (top := module.partition(".")[0]) in HEAVY:
                importers[top].add(name)
    for package, files in importers.items():
        if len(files) > HEAVY_FILES_MAX.get(package, 1):
            yield f"{package}: imported by {', '.join(sorted(files))}"
        for file in files:
            if not file.startswith(tuple(HEAVY[package]) or ("nowhere",)):
                yield f"{package}: imported by {file}, expected in {HEAVY[package] or 'no file'}"


def folders_hold_few_modules() -> Findings:
    counts = Counter(name.rpartition("/")[0] for name, _ in sources() if "__init__" not in name)
    for folder, count in counts.items():
        if count > FOLDER_MODULES_MAX:
            yield f"{folder}: {count} modules, more than {FOLDER_MODULES_MAX}"


def modules_import_in_no_circle() -> Findings:
    for circle in circles(modules_of(sources())):
        yield f"{', '.join(circle)} import each other"


def rooms_import_one_way() -> Findings:
    graph = modules_of(sources())
    for folder in folders_of(graph):
        for circle in circles(entries_of(graph, folder)):
            yield f"{folder or 'top level'}: {', '.join(circle)} import each other"


def the_core_has_few_floors() -> Findings:
    floors = longest_chain(modules_of(sources("streams/core")), "streams/core")
    if len(floors) > CORE_FLOORS_MAX:
        yield f"{len(floors)} floors of imports: {' -> '.join(floors)}"


def functions_are_short() -> Findings:
    for name, tree in sources():
        for node in nodes(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            lines = (node.end_lineno or 0) - first.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{name}:{node.lineno}: {node.name} has {lines} lines"


def files_are_short() -> Findings:
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name, _ in sources()}
    for name, lines in lengths.items():
        lines_max = TEST_LINES_MAX if name.startswith("tests/") else FILE_LINES_MAX
        if lines > lines_max and name != "schemas/records.py":  # generated, one class per schema
            yield f"{name}: {lines} lines"
    longer = {name: lines for name, lines in lengths.items() if lines > FILE_LINES_USUAL}
    if len(longer) > LONGER_SHARE_MAX * len(lengths):
        yield f"{len(longer)} of {len(lengths)} files exceed {FILE_LINES_USUAL} lines: {longer}"


def modules_say_what_they_do() -> Findings:
    for name, tree in sources():
        if name.endswith("__init__.py"):
            continue
        text = ast.get_docstring(tree) or ""
        lines = len(text.splitlines())
        if not lines:
            yield f"{name}:1: no docstring"
        elif lines > DOCSTRING_LINES_MAX and THEORY not in text and name != "schemas/errors.py":
            yield f"{name}:1: docstring of {lines} lines"


def errors_are_not_swallowed() -> Findings:
    for name, tree in sources():
        for node in nodes(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            if node.type is None:
                yield f"{name}:{node.lineno}: bare except"
                continue
            broad = {"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(node.type)))
            if broad and all(isinstance(statement, ast.Pass) for statement in node.body):
                yield f"{name}:{node.lineno}: except {broad.pop()}: pass"


def tasks_are_kept() -> Findings:
    spawns = re.compile(r"^(asyncio|.*loop)\.(create_task|ensure_future)$|^ensure_future$")
    for name, tree in sources():
        for node in nodes(tree):
            if isinstance(node, ast.Expr) and spawns.match(called(node.value)):
                yield f"{name}:{node.lineno}: the task may be collected while it runs"


def no_sleeps_in_tests() -> Findings:
    for name, tree in sources("tests"):
        for node in nodes(tree):
            if called(node) in {"asyncio.sleep", "time.sleep"} and name not in POLLING_FILES:
                if ast.unparse(node) != "asyncio.sleep(0)":  # yields once, waits for nothing
                    yield f"{name}:{node.lineno}: wait for a condition"  # type: ignore[attr-defined]  # a Call


def in_real_time(tree: ast.Module) -> Iterator[ast.AST]:
    """All of a test file but the functions that run on virtual time, where no machine is slow."""
    for part in tree.body:
        inside = list(ast.walk(part))
        names = {node.id for node in inside if isinstance(node, ast.Name)}
        if isinstance(part, ast.ClassDef) or not names & {"virtual", "run_virtual"}:
            yield from inside


def only_clients_pause_in_real_time() -> Findings:
    for name, tree in sources("tests"):
        for node in nodes(tree):
            if called(node) == "pause" and name not in PAUSING_FILES:
                yield f"{name}:{node.lineno}: wait for a condition, or on virtual time"  # type: ignore[attr-defined]  # a Call


def only_hangs_reach_the_bounds_of_tests() -> Findings:
    for name, tree in sources("tests"):
        for node in in_real_time(tree):
            if not isinstance(node, ast.Call):
                continue
            arguments = {keyword.arg or "**": keyword.value for keyword in node.keywords}
            bounds = [value for key, value in arguments.items() if key in BOUNDS]
            if called(node) in WAITS:
                bounds += [
                    *node.args[-1:],
                    *(arguments[key] for key in arguments if key == "seconds"),
                ]
            if called(node) in HTTP_CALLS and not arguments.keys() & {"timeout", "transport"}:
                yield f"{name}:{node.lineno}: it gives up after 5 s"
            is_mark = called(node) == "pytest.mark.timeout"
            least_s = TIMEOUT_S if is_mark else PATIENCE_S
            for bound in [*bounds, *node.args] if is_mark else bounds:
                value = bound.value if isinstance(bound, ast.Constant) else None
                if isinstance(value, int | float) and value < least_s:
                    yield f"{name}:{node.lineno}: {value} s; see `tests/waits.py`"


def no_test_judges_by_the_clock() -> Findings:
    def reads(node: ast.AST) -> bool:
        return any(called(part) in CLOCKS for part in ast.walk(node))

    for name, tree in sources("tests"):
        clocked = list(in_real_time(tree)) if name not in TIMING_FILES else []
        assigned = [node for node in clocked if isinstance(node, ast.Assign) and reads(node.value)]
        times = {
            part.id
            for node in assigned
            for target in node.targets
            for part in ast.walk(target)
            if isinstance(part, ast.Name)
        }
        for node in clocked:
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                sides = (node.left, node.right)
                if all(called(s) in CLOCKS or getattr(s, "id", "") in times for s in sides):
                    yield f"{name}:{node.lineno}: count, or use virtual or processor time"


def nothing_is_unfinished() -> Findings:
    for path in tracked():
        if path.suffix in {".py", ".md", ".toml", ".xml", ".avsc"}:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if UNFINISHED in line:
                    yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def no_place_of_one_machine() -> Findings:
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := PLACES.search(line):
                yield f"{path.relative_to(ROOT)}:{number}: {match.group()}"


def nothing_built_is_kept() -> Findings:
    """Maven's note that something was unpacked had every clean clone go without it."""
    for path in tracked():
        name = path.relative_to(ROOT)
        if {"build", "target"} & {*name.parts[:-1]}:
            yield f"{name}: built, so not for git"


RULES: tuple[Callable[[], Findings], ...] = (
    imports_point_downward,
    research_serves_nobody,
    imports_are_absolute,
    packages_are_empty,
    the_core_is_pure,
    heavy_packages_have_one_importer,
    folders_hold_few_modules,
    modules_import_in_no_circle,
    rooms_import_one_way,
    the_core_has_few_floors,
    functions_are_short,
    files_are_short,
    modules_say_what_they_do,
    errors_are_not_swallowed,
    tasks_are_kept,
    no_sleeps_in_tests,
    only_clients_pause_in_real_time,
    only_hangs_reach_the_bounds_of_tests,
    no_test_judges_by_the_clock,
    nothing_is_unfinished,
    no_place_of_one_machine,
    nothing_built_is_kept,
    *tidy_names.RULES,
    *tidy_pages.RULES,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Callable[[], Findings]) -> None:
    broken = list(rule())
    assert not broken, "\n".join([rule.__name__.replace("_", " ") + ", but:", *broken])

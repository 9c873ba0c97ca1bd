"""The house rules for pages: `tests/test_tidy.py` runs them with its own.

Each rule yields every place that breaks it. Reads text only; what commands take, the real parsers
say (`tests/infra/docs/test_commands.py`).
"""

import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache

from tests.import_graph import FOLDERS, PRODUCT, ROOT, sources, tracked

PROSE_COLUMNS_MAX = 120
PAGE_LINES_MAX = {"README.md": 150, "ARCHITECTURE.md": 250}
WAY_FILES_MAX = 35  # that run from HTTP to the engine
HISTORY = ("LOG.md", "CHANGELOG.md", "infra/docs/log/")  # what they name may be gone
_NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*|[A-Z]+\.md)`")
_MODULE = re.compile(r"`((?:\w+/)*\w+\.(?:py|cu))`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")

Findings = Iterator[str]


@cache
def pages() -> dict[str, str]:
    """Name and text of every page that git knows or would add."""
    paths = (path for path in tracked() if path.suffix == ".md")
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def of_today() -> dict[str, str]:
    """Return pages about the present state, not the history."""
    return {name: text for name, text in pages().items() if not name.startswith(HISTORY)}


def without_code(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside of code blocks, with their numbers."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def anchors(text: str) -> set[str]:
    """What a link may name after its `#`: headings as they are shown on the web."""
    heads = [line.lstrip("# ") for _, line in without_code(text) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def prose_is_narrow() -> Findings:
    for name, text in pages().items():
        for number, line in without_code(text):
            if len(line) > PROSE_COLUMNS_MAX and not line.lstrip().startswith("|"):
                yield f"{name}:{number}: {len(line)} columns"


def pages_are_short() -> Findings:
    for name, lines_max in PAGE_LINES_MAX.items():
        if (lines := len(pages()[name].splitlines())) > lines_max:
            yield f"{name}: {lines} lines, expected at most {lines_max}"


def pages_have_one_title() -> Findings:
    for name, text in pages().items():
        titles = [line for _, line in without_code(text) if line.startswith("# ")]
        if len(titles) != 1:
            yield f"{name}: {len(titles)} titles"


def pages_name_files_that_exist() -> Findings:
    for name, text in of_today().items():
        for number, line in enumerate(text.splitlines(), 1):
            for path in _NAMED.findall(line):
                if not any(ROOT.glob(path.rstrip("/"))):
                    yield f"{name}:{number}: {path} is not there"
            for path in _missing_modules(line):
                yield f"{name}:{number}: {path} is not there"


@cache
def _module_paths() -> str:
    """The paths of all modules and kernels, each behind a slash."""
    return " ".join(f"/{path.relative_to(ROOT)}" for path in tracked()) + " "


def _missing_modules(text: str) -> list[str]:
    """Modules that a text names, with or without folders, and that are nowhere."""
    return [path for path in _MODULE.findall(text) if f"/{path} " not in _module_paths()]


def sources_name_files_that_exist() -> Findings:
    for name, _ in sources(*PRODUCT):
        text = (ROOT / name).read_text(encoding="utf-8")
        for page in re.findall(r"\b[\w/]*[A-Za-z]+\.md\b", text):
            if not (ROOT / page).is_file():
                yield f"{name}: {page} is not there"
        for path in _missing_modules(text):
            yield f"{name}: {path} is not there"


def links_lead_somewhere() -> Findings:
    for name, text in pages().items():
        for number, line in without_code(text):
            for link in _LINK.findall(line):
                if link.startswith(("http:", "https:")):
                    continue
                path, _, anchor = link.partition("#")
                target = (ROOT / name).parent / path if path else ROOT / name
                if not target.exists():
                    yield f"{name}:{number}: {path} is not there"
                elif anchor and anchor not in anchors(target.read_text()):
                    yield f"{name}:{number}: {link} names no heading"


def way_files() -> list[str]:
    """Files that a request passes from HTTP to the engine, in the order of their rows."""
    _, _, rest = pages()["ARCHITECTURE.md"].partition("## The way of a request\n")
    way, _, _ = rest.partition("\n### The way back")
    rows = [line.split("|")[2] for line in way.splitlines() if line.startswith("| ")]
    return [path for row in rows for path in _NAMED.findall(row)]


def the_way_of_a_request_is_short() -> Findings:
    files = way_files()
    if not files or len(set(files)) > WAY_FILES_MAX:
        yield f"ARCHITECTURE.md: {len(set(files))} files, expected 1 to {WAY_FILES_MAX}"


def experiments_have_verdicts() -> Findings:
    """Each has a title and a verdict in one line on the page of its month; `LOG.md` lists both."""
    listed = " ".join(pages()["LOG.md"].split())
    for name in sorted(name for name in pages() if name.startswith("infra/docs/log/")):
        lines = [line for _, line in without_code(pages()[name]) if line]
        for line, after in itertools.pairwise([*lines, ""]):
            title, verdict = line.removeprefix("### "), re.fullmatch(r"\*\*(.+)\*\*", after)
            if title == line:
                continue
            if verdict is None:
                yield f"{name}: {title}: expected a verdict such as **Dropped: no gain.** below it"
            elif f"- {title}: *{verdict[1]}*" not in listed:
                yield f"LOG.md: expected the line - {title}: *{verdict[1]}*"


def pages_name_targets_that_exist() -> Findings:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for name, text in of_today().items():
        code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", code):
            if target not in targets:
                yield f"{name}: make {target} is no target"


RULES: tuple[Callable[[], Findings], ...] = (
    prose_is_narrow,
    pages_are_short,
    pages_have_one_title,
    pages_name_files_that_exist,
    sources_name_files_that_exist,
    links_lead_somewhere,
    the_way_of_a_request_is_short,
    experiments_have_verdicts,
    pages_name_targets_that_exist,
)

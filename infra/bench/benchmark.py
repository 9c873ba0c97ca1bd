"""A benchmark as a command: reads its options, runs it, writes the report and shows it.

The command line has `--quick`, `--json`, and every field of the options that `offered` made. What
is measured, and what the figures mean, is each benchmark's own.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_type_hints

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from infra.bench import results
from infra.bench.results import Bar, command_line, show_bars, write_report

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
_FILE_COLUMNS = 120  # where the output is not a terminal


def offered(default: Any, said: str = "", *, flag: str = "", choices: Sequence[str] = ()) -> Any:
    """A field of the options that the command line can set, with its help. Seconds have a flag
    without their `_s`; a tuple takes several values."""
    return field(default=default, metadata={"said": said, "flag": flag, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a benchmark found. `shown` is printed above the bars."""

    figures: Mapping[str, Any]
    bars: Sequence[Bar] = ()
    shown: Sequence[RenderableType] = ()
    load: Mapping[str, Any] = field(default_factory=dict)  # what the options do not say
    beside: str = ""  # what else was written, behind the report's path


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(Generic[Options]):
    """`main` is the entry of `trivium bench NAME`."""

    name: str
    about: str | None
    run: Callable[[Options, Console], Findings | Coroutine[Any, Any, Findings]]
    full: Options
    quick: Options
    quick_said: str  # how it differs

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run with the options, write build/bench/NAME.json, and print tables, or it as JSON."""
        options, as_json = self.options(sys.argv[1:] if arguments is None else arguments)
        console = Console(stderr=as_json)
        if not console.is_terminal:
            console.width = _FILE_COLUMNS
        found = self.run(options, console)
        if isinstance(found, Coroutine):
            try:
                found = asyncio.run(_until_terminated(found))
            except asyncio.CancelledError:
                sys.exit(128 + signal.SIGTERM)
        load = asdict(options)
        path = write_report(
            self.name.replace("-", "_"),
            command=command_line(),
            seed=load.get("seed", 0),
            load={**load, **found.load},
            figures=dict(found.figures),
            bars=found.bars,
            folder=results.BENCH_DIR,
        )
        for each in found.shown:
            console.print(each)
        if found.bars:
            show_bars(found.bars, console)
        console.print(f"Written to {path}{found.beside}.")
        if as_json:
            print(json.dumps(json.loads(path.read_text()), indent=1))

    def options(self, arguments: Sequence[str]) -> tuple[Options, bool]:
        """The options, and whether the report is wanted as JSON."""
        parser = argparse.ArgumentParser(prog=f"bench {self.name}", description=self.about)
        parser.add_argument("--quick", action="store_true", help=self.quick_said)
        parser.add_argument("--json", action="store_true", help="print the report, not tables")
        hints = get_type_hints(type(self.full))
        for each in fields(self.full):
            if "said" not in (told := each.metadata):
                continue
            kind, *several = get_args(hints[each.name]) or (hints[each.name],)
            flag = told["flag"] or each.name.removesuffix("_s").replace("_", "-")
            parser.add_argument(
                f"--{flag}",
                dest=each.name,
                type=kind,
                nargs="+" if several else None,
                help=told["said"],
                choices=told["choices"] or None,
                metavar=None if told["choices"] else flag.upper(),
            )
        given = vars(parser.parse_args(arguments))
        base = self.quick if given.pop("quick") else self.full
        as_json = given.pop("json")
        changes = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
        return replace(base, **changes), as_json


async def _until_terminated(running: Coroutine[Any, Any, Findings]) -> Findings:
    """SIGTERM ends it as Ctrl-C does, so that it stops what it has started, and whom it froze."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await running


def counting(console: Console, width: int) -> Progress:
    """Bars that say how many are done, beside descriptions of so many columns."""
    description = TextColumn(f"{{task.description:<{width}}}")
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(description, *columns, console=console)

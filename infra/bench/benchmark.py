"""Runs a benchmark as a command: reads its options, runs it, writes the report and prints it.

The command line has `--quick`, `--json`, and every field of the options that `option` made. Each
benchmark defines what it measures and what its figures mean.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_type_hints

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from infra.bench import results
from infra.bench.results import Bar, command_line, show_bars, write_report

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
_FILE_COLUMNS = 120  # if the output is not a terminal
_PROGRESS_COLUMNS = 40  # of the description of a progress bar


def option(
    default: Any, help_text: str = "", *, flag: str = "", choices: Sequence[str] = ()
) -> Any:
    """Return a field of the options that the command line can set, with its help. The default flag
    is the field's name without `_s`. A tuple takes several values."""
    return field(default=default, metadata={"help": help_text, "flag": flag, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """Result of a benchmark. `tables` are printed above the bars."""

    figures: Mapping[str, Any]
    bars: Sequence[Bar] = ()
    tables: Sequence[RenderableType] = ()
    load: Mapping[str, Any] = field(default_factory=dict)  # beside the options
    beside: str = ""  # printed after the report's path: other files


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[Options]):
    """One benchmark. `trivium bench NAME` calls `main`."""

    name: str
    about: str | None
    run: Callable[[Options, Console], BenchmarkResult | Coroutine[Any, Any, BenchmarkResult]]
    _: KW_ONLY
    full: Options
    quick: Options
    quick_help: str  # how `quick` differs from `full`

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run the benchmark, write build/bench/NAME.json, and print its tables or the report."""
        options, as_json = self.options(sys.argv[1:] if arguments is None else arguments)
        console = Console(stderr=as_json)
        if not console.is_terminal:
            console.width = _FILE_COLUMNS
        with progress_on(console):
            result = self.run(options, console)
            if isinstance(result, Coroutine):
                try:
                    result = asyncio.run(_until_terminated(result))
                except asyncio.CancelledError:
                    sys.exit(128 + signal.SIGTERM)
        load = asdict(options)
        path = write_report(
            self.name.replace("-", "_"),
            command=command_line(),
            seed=load.get("seed", 0),
            load={**load, **result.load},
            figures=dict(result.figures),
            bars=result.bars,
            folder=results.BENCH_DIR,
        )
        for table in result.tables:
            console.print(table)
        if result.bars:
            show_bars(result.bars, console)
        console.print(f"Written to {path}{result.beside}.")
        if as_json:
            print(json.dumps(json.loads(path.read_text()), indent=1))

    def options(self, arguments: Sequence[str]) -> tuple[Options, bool]:
        """Return the parsed options, and whether to print the report as JSON."""
        parser = argparse.ArgumentParser(prog=f"bench {self.name}", description=self.about)
        parser.add_argument("--quick", action="store_true", help=self.quick_help)
        parser.add_argument("--json", action="store_true", help="print the report, not tables")
        hints = get_type_hints(type(self.full))
        for option_field in fields(self.full):
            if "help" not in (metadata := option_field.metadata):
                continue
            kind, *several = get_args(hints[option_field.name]) or (hints[option_field.name],)
            flag = metadata["flag"] or option_field.name.removesuffix("_s").replace("_", "-")
            parser.add_argument(
                f"--{flag}",
                dest=option_field.name,
                type=kind,
                nargs="+" if several else None,
                help=metadata["help"],
                choices=metadata["choices"] or None,
                metavar=None if metadata["choices"] else flag.upper(),
            )
        parsed_args = vars(parser.parse_args(arguments))
        base = self.quick if parsed_args.pop("quick") else self.full
        as_json = parsed_args.pop("json")
        changes = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in parsed_args.items()
            if value is not None
        }
        return replace(base, **changes), as_json


async def _until_terminated(running: Coroutine[Any, Any, BenchmarkResult]) -> BenchmarkResult:
    """Cancel the benchmark on SIGTERM, so that it stops its processes and thaws frozen ones."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await running


_bars = [Progress(disable=True)]  # of the running benchmark; without one, nobody sees them


@contextmanager
def progress_on(console: Console) -> Iterator[None]:
    """Show the bars of `counting` on the console until the block ends."""
    description = TextColumn(f"{{task.description:<{_PROGRESS_COLUMNS}}}")
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(description, *columns, console=console) as bars:
        _bars.append(bars)
        try:
            yield
        finally:
            _bars.pop()


def counting(name: str, total: float) -> Callable[..., None]:
    """Add a progress bar. Call the result with `advance=1`, or with what is `completed`; it may
    also change the bar's `description`."""
    bars = _bars[-1]
    return partial(bars.update, bars.add_task(name, total=total))


@contextmanager
def measuring(name: str) -> Iterator[None]:
    """Show as a progress bar that this step runs, until the block ends."""
    advance = counting(name, 1)
    yield
    advance(advance=1)

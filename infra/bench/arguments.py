"""How benchmarks read their command lines: `--quick` and `--json`, and any field of their options;
and how those on asyncio run.

A parser names a field of the options as its destination; what is not given stays as it is there.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def chosen(
    parser: argparse.ArgumentParser, arguments: Sequence[str], *, full: Options, quick: Options
) -> tuple[Options, bool]:
    """The options, and whether the report is wanted as JSON."""
    given = vars(parser.parse_args(arguments))
    base = quick if given.pop("quick") else full
    as_json = given.pop("json")
    changes = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    return replace(base, **changes), as_json


def run_and_print(
    arguments: Sequence[str] | None,
    parse: Callable[[Sequence[str]], tuple[Options, bool]],
    run: Callable[[Options, Console], Coroutine[Any, Any, Mapping[str, Any]]],
) -> None:
    """A benchmark's `main`: run with the options, and print the report where JSON is wanted."""
    options, as_json = parse(sys.argv[1:] if arguments is None else arguments)
    report = asyncio.run(run(options, Console(stderr=as_json)))
    if as_json:
        print(json.dumps(report, indent=1))

"""How benchmarks read their command lines: `--quick` and `--json`, and any field of their options.

A parser names a field of the options as its destination; what is not given stays as it is there.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

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

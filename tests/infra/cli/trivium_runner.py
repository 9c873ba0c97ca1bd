"""Runs `trivium` as people and scripts do: as a program, or without its start in this process."""

import contextlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from infra.cli import app
from tests.long_leases import SLOW_BROKER

PLAIN = {"COLUMNS": "200", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}  # no colours, wherever that runs
Ran = tuple[int, str, str]  # exit code, output and errors


def trivium(*arguments: str, home: Path | None = None, env: Mapping[str, str] | None = None) -> Ran:
    """As a program of its own."""
    command = [sys.executable, "-m", "infra.cli.app", *arguments]
    environ = {**os.environ, **_variables(home, env)}
    process = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    return process.returncode, process.stdout, process.stderr


def trivium_here(
    *arguments: str, home: Path | None = None, env: Mapping[str, str] | None = None
) -> Ran:
    """The same in this process, where a start would be most of the time."""
    code, output, errors = 0, io.StringIO(), io.StringIO()
    log = logging.getLogger("aiokafka")
    level = log.level
    with (
        patch.dict(os.environ, _variables(home, env)),
        patch.object(sys, "argv", ["trivium", *arguments]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            app.main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            log.setLevel(level)
    return code, output.getvalue(), errors.getvalue()


def _variables(home: Path | None, env: Mapping[str, str] | None) -> dict[str, str]:
    home_variables = {} if home is None else {"TRIVIUM_HOME": str(home)}
    return {**PLAIN, **SLOW_BROKER, **(env or {}), **home_variables}

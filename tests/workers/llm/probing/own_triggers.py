"""The trigger that the page shows, packaged as it says, for tests that install it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "infra" / "docs" / "integrate.md"
UV = ROOT / "build" / "bootstrap" / "bin" / "uv"
NAME = "doubt"


def install(folder: Path) -> Path:
    """Install the page's package beside others; returns what has to be on Python's path."""
    section = PAGE.read_text().partition("#### A trigger of your own\n")[2].partition("\n#")[0]
    code, project = re.findall(r"^```\w*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    source, site = folder / "source", folder / "site"
    source.mkdir(parents=True)
    (source / "own_triggers.py").write_text(code)
    (source / "pyproject.toml").write_text(project)
    options = ["--quiet", "--offline", "--no-deps", "--no-build-isolation"]
    python = ["--python", sys.executable, "--target", str(site)]
    command = [str(UV), "pip", "install", *options, *python, str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return site

"""The storage of a new node: a copy of the one that set-up has kept.

Kafka's tool takes a second to format one, which would be a third of a broker's start. All of it is
the same for each node that is alone, but for the name of its cluster. `infra/stack/aot_cache.py`
has it made, `node.py` takes it; where there is none, the tool is asked as ever.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

_NAMED, _CLUSTER = "meta.properties", re.compile(r"^cluster\.id=.+$", re.MULTILINE)


def kept_storage(libs: Path) -> Path:
    """Where that of these jars is kept; Kafka has nothing of this name."""
    return libs.parent / "trivium-storage"


def keep(made: Path, kept: Path) -> None:
    """Have what the tool made, and nothing has used, as the one to copy."""
    drop(kept)
    draft = kept.with_name(f"{kept.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(made, draft)
    draft.rename(kept)


def drop(kept: Path) -> None:
    """Keep it no longer."""
    shutil.rmtree(kept, ignore_errors=True)


def is_laid_out(data: Path) -> bool:
    """Whether a node has its storage: what names it is written last, and is not empty."""
    named = data / _NAMED
    return named.exists() and named.stat().st_size > 0


def cluster_of(data: Path) -> str:
    """The id of the cluster that a node with this storage is of."""
    (line,) = _CLUSTER.findall((data / _NAMED).read_text())
    return str(line).partition("=")[2].strip()


def lay_out(kept: Path, data: Path, cluster: str) -> bool:
    """Copy it for a node of this cluster; False where there is none, or not all of it."""
    try:
        named, replaced = _CLUSTER.subn(f"cluster.id={cluster}", (kept / _NAMED).read_text())
        if not replaced or not all(file.stat().st_size for file in kept.rglob("*")):
            return False
        shutil.copytree(kept, data, ignore=shutil.ignore_patterns(_NAMED), dirs_exist_ok=True)
        draft = data / f"{_NAMED}.new"
        draft.touch(mode=0o600)
        draft.write_text(named)
        draft.rename(data / _NAMED)
    except OSError:
        return False
    return True


def size(data: Path) -> int:
    """In bytes on the disk, as far as its files are there: a broker deletes some at any time."""
    total = 0
    for where, _, names in os.walk(data):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(where, name)).st_blocks * 512
    return total

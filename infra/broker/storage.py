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

_META_FILE, _CLUSTER = "meta.properties", re.compile(r"^cluster\.id=.+$", re.MULTILINE)


def template_path(libs: Path) -> Path:
    """Where that of these jars is kept; Kafka has nothing of this name."""
    return libs.parent / "trivium-storage"


def save_template(source: Path, template: Path) -> None:
    """Save what the tool made, and nothing has used, as the template to copy."""
    delete_template(template)
    draft = template.with_name(f"{template.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    draft.rename(template)


def delete_template(template: Path) -> None:
    """Delete the storage template, if there is one."""
    shutil.rmtree(template, ignore_errors=True)


def is_formatted(data: Path) -> bool:
    """Whether a node has its storage: what names it is written last, and is not empty."""
    meta_file = data / _META_FILE
    return meta_file.exists() and meta_file.stat().st_size > 0


def cluster_of(data: Path) -> str:
    """The id of the cluster that a node with this storage is of."""
    (line,) = _CLUSTER.findall((data / _META_FILE).read_text())
    return str(line).partition("=")[2].strip()


def copy_template(template: Path, data: Path, cluster: str) -> bool:
    """Copy the template for a node of this cluster; False if it is missing or incomplete."""
    try:
        properties, replaced = _CLUSTER.subn(
            f"cluster.id={cluster}", (template / _META_FILE).read_text()
        )
        if not replaced or not all(file.stat().st_size for file in template.rglob("*")):
            return False
        shutil.copytree(
            template, data, ignore=shutil.ignore_patterns(_META_FILE), dirs_exist_ok=True
        )
        draft = data / f"{_META_FILE}.new"
        draft.touch(mode=0o600)
        draft.write_text(properties)
        draft.rename(data / _META_FILE)
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

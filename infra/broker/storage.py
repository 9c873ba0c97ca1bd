"""Makes the storage of a new node by copying a template that set-up has saved.

Kafka's tool takes a second to format a storage, which would be a third of a broker's start. The
storage is the same for each single node, except for the cluster's id. `infra/stack/aot_cache.py`
saves the template and `node.py` copies it. Where there is none, `node.py` runs Kafka's tool.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

_META_FILE, _CLUSTER = "meta.properties", re.compile(r"^cluster\.id=.+$", re.MULTILINE)


def template_path(libs: Path) -> Path:
    """Return the path of the template for these jars; Kafka itself uses no such name."""
    return libs.parent / "trivium-storage"


def save_template(source: Path, template: Path) -> None:
    """Save a storage as the template: one that Kafka's tool made and no node has used."""
    delete_template(template)
    draft = template.with_name(f"{template.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    draft.rename(template)


def delete_template(template: Path) -> None:
    """Delete the storage template, if there is one."""
    shutil.rmtree(template, ignore_errors=True)


def is_formatted(data: Path) -> bool:
    """Return whether a node has its storage: `meta.properties`, written last, is not empty."""
    meta_file = data / _META_FILE
    return meta_file.exists() and meta_file.stat().st_size > 0


def cluster_of(data: Path) -> str:
    """Return the id of the cluster of a node with this storage."""
    (line,) = _CLUSTER.findall((data / _META_FILE).read_text())
    return str(line).partition("=")[2].strip()


def copy_template(template: Path, data: Path, cluster: str) -> bool:
    """Copy the template for a node of this cluster; return False if it is missing or incomplete."""
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
    """Return the bytes that the storage takes on disk; files deleted meanwhile do not count."""
    total = 0
    for where, _, names in os.walk(data):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(where, name)).st_blocks * 512
    return total

"""A folder of snapshots: what a kill leaves in it goes, and what others write stays."""

import os
import time
from pathlib import Path

from workers.retrieval.snapshot_folder import SnapshotFolder

HOUR_S = 3_600


def wrote(folder: SnapshotFolder) -> None:
    with folder.writing() as path:
        (path / "a.index").write_bytes(b"whole")


def names(path: Path) -> list[str]:
    return sorted(entry.name.partition(".")[2] for entry in path.iterdir())


def test_snapshot_folder_removes_partials_of_killed_process(tmp_path: Path) -> None:
    """Each kill would leave files of the index's size."""
    folder = SnapshotFolder(tmp_path, "mine", 2)
    for writer in ("mine", "also.mine", "gone"):
        (tmp_path / f"1-0.{writer}.partial").mkdir()
        (tmp_path / f"1-0.{writer}.partial" / "a.index").write_bytes(b"wh")
    folder.remove_own_partials()
    assert names(tmp_path) == ["also.mine.partial", "gone.partial"], "others may write them now"
    long_ago = time.time() - 2 * HOUR_S
    os.utime(tmp_path / "1-0.also.mine.partial", (long_ago, long_ago))
    for path in (tmp_path / "1-0.gone.partial", tmp_path / "1-0.gone.partial" / "a.index"):
        os.utime(path, (long_ago, long_ago))
    wrote(folder)
    assert names(tmp_path) == ["also.mine.partial", "mine.snapshot"], "one file of it was touched"

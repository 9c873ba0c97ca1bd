"""A folder of snapshots that several replicas may use: each is there as a whole, or not at all.

A snapshot is a folder of files that never change. It is written beside its place and moved there in
one step, under a name that nobody else takes, so two writers at once only make two of them. It goes
by its name first and then by its files, so nobody who still reads it takes a part for the whole.
"""

import logging
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schemas.log.clock import wall_ms
from workers.search.index.snapshot import sync_folder

_WHOLE, _PARTIAL, _ASIDE = ".snapshot", ".partial", ".unreadable"
_UNTOUCHED_S = 3_600  # since then nobody writes it any more
log = logging.getLogger("trivium.retrieval")


class SnapshotFolder:
    """Of one shard's replicas, or of one worker; `kept` snapshots stay."""

    def __init__(self, path: Path, writer: str, max_snapshots: int) -> None:
        self.path = path
        self._writer = writer
        self.max_snapshots = max_snapshots

    def list_snapshots(self) -> list[Path]:
        """Whole snapshots, the newest first."""
        return sorted(self.path.glob(f"*{_WHOLE}"), reverse=True)

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Where the files of a snapshot go; it is there when the block ends. Raises OSError."""
        newest = max((_time_ms(snapshot) for snapshot in self.list_snapshots()), default=0)
        time_ms = max(wall_ms(), newest + 1)  # the former writer's clock may be ahead
        name = f"{time_ms:013d}-{secrets.token_hex(4)}.{self._writer}"
        partial = self.path / f"{name}{_PARTIAL}"
        partial.mkdir(parents=True)
        try:
            yield partial
            partial.replace(self.path / f"{name}{_WHOLE}")
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync_folder(self.path)
        self._clean()

    def quarantine(self, snapshot: Path, why: Exception) -> None:
        """Let nobody read it again; it stays for whoever wants to know why."""
        quarantine_path = snapshot.with_suffix(_ASIDE)
        log.warning("a snapshot cannot be read, and is put aside as %s: %s", quarantine_path, why)
        with suppress(OSError):  # another reader did, or it is gone
            snapshot.replace(quarantine_path)

    def remove_own_partials(self) -> None:
        """Remove what a former process of this worker left half written."""
        for partial in self.path.glob(f"*{_PARTIAL}"):
            if partial.stem.partition(".")[2] == self._writer:
                shutil.rmtree(partial, ignore_errors=True)

    def _clean(self) -> None:
        """Remove older snapshots, what nobody finished, and all that was put aside but the last."""
        for snapshot in self.list_snapshots()[self.max_snapshots :]:
            with suppress(OSError):  # another writer does
                shutil.rmtree(snapshot.replace(snapshot.with_suffix(_PARTIAL)), ignore_errors=True)
        for partial in self.path.glob(f"*{_PARTIAL}"):
            if time.time() - _touched_s(partial) > _UNTOUCHED_S:
                shutil.rmtree(partial, ignore_errors=True)
        for quarantine_path in sorted(self.path.glob(f"*{_ASIDE}"))[:-1]:
            shutil.rmtree(quarantine_path, ignore_errors=True)
        for file in self.path.glob("*.index*"):  # of former releases, which had no folders
            with suppress(OSError):
                file.unlink()


def _time_ms(snapshot: Path) -> int:
    """Read the time from a snapshot's name, by which names sort."""
    digits = snapshot.name.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _touched_s(folder: Path) -> float:
    """When something was last written in it; now, where that cannot be told."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return time.time()

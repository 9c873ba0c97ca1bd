"""A folder of snapshots that several replicas may use: each snapshot is complete or absent.

A snapshot is a folder of files that never change. It is written under a temporary name and renamed
in one step to a unique name, so two writers at once make two snapshots. A snapshot that is deleted
is renamed before its files are removed, so a reader never takes a part for the whole.
"""

import logging
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streams.log.clock import wall_ms
from workers.vector.index.snapshot import sync_folder

_WHOLE, _PARTIAL, _ASIDE = ".snapshot", ".partial", ".unreadable"
_UNTOUCHED_S = 3_600  # without a write, after which a partial snapshot is abandoned
log = logging.getLogger("trivium.retrieval")


class SnapshotFolder:
    """The snapshots of one shard's replicas, or of one worker; the newest `max_snapshots` stay."""

    def __init__(self, path: Path, writer: str, max_snapshots: int) -> None:
        self.path = path
        self._writer = writer
        self.max_snapshots = max_snapshots

    def list_snapshots(self) -> list[Path]:
        """Return the complete snapshots, the newest first."""
        return sorted(self.path.glob(f"*{_WHOLE}"), reverse=True)

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Yield the folder for a new snapshot's files; it is complete when the block ends.

        Raises OSError."""
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
        """Rename a damaged snapshot, so that no reader takes it and an operator can examine it."""
        quarantine_path = snapshot.with_suffix(_ASIDE)
        log.warning("a snapshot cannot be read, and is put aside as %s: %s", quarantine_path, why)
        with suppress(OSError):  # another reader renamed it, or it is gone
            snapshot.replace(quarantine_path)

    def remove_own_partials(self) -> None:
        """Remove partial snapshots of this worker's former processes."""
        for partial in self.path.glob(f"*{_PARTIAL}"):
            if partial.stem.partition(".")[2] == self._writer:
                shutil.rmtree(partial, ignore_errors=True)

    def _clean(self) -> None:
        """Remove older snapshots, abandoned partial ones, and damaged ones except the last."""
        for snapshot in self.list_snapshots()[self.max_snapshots :]:
            with suppress(OSError):  # another writer removes it
                shutil.rmtree(snapshot.replace(snapshot.with_suffix(_PARTIAL)), ignore_errors=True)
        for partial in self.path.glob(f"*{_PARTIAL}"):
            if time.time() - _touched_s(partial) > _UNTOUCHED_S:
                shutil.rmtree(partial, ignore_errors=True)
        for quarantine_path in sorted(self.path.glob(f"*{_ASIDE}"))[:-1]:
            shutil.rmtree(quarantine_path, ignore_errors=True)


def _time_ms(snapshot: Path) -> int:
    """Return the time in a snapshot's name, by which names sort, in ms; 0 if it has none."""
    digits = snapshot.name.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _touched_s(folder: Path) -> float:
    """Return the time of the last write in a folder, in s; now, if that cannot be read."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return time.time()

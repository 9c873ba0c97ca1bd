"""A model's folder is written once and whole, whoever asks at once and whoever is killed."""

import fcntl
import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from workers.models.conversion import convert_gguf, join_pieces, lock_file, write_once

_STUCK = """
import sys, threading
from pathlib import Path
from workers.models.conversion import write_once

def write(folder):
    (folder / "half").touch()
    print("half", flush=True)
    threading.Event().wait()

write_once(Path(sys.argv[1]), write)
"""


def test_model_writer_locks_folder_and_writes_once(tmp_path: Path) -> None:
    """A lock keeps other processes waiting."""
    target = tmp_path / "models" / "a"
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        with lock_file(target).open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever else asks waits
        (folder / "file").write_text("whole")

    write_once(target, write)
    write_once(target, write)
    assert len(written) == 1
    assert (target / "file").read_text() == "whole"
    with lock_file(target).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_killed_model_writer_leaves_no_partial_folder(tmp_path: Path) -> None:
    """The next writer can start at once."""
    target = tmp_path / "models" / "a"
    command = [sys.executable, "-c", _STUCK, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "half\n"
        stuck.send_signal(signal.SIGKILL)
    assert not target.exists()
    write_once(target, lambda folder: (folder / "file").touch())
    assert [file.name for file in target.iterdir()] == ["file"]
    assert {file.name for file in target.parent.iterdir()} == {"a", ".a.lock"}  # no draft stays


def test_failed_model_writer_leaves_no_folder(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_once(tmp_path / "a", write)
    assert [file.name for file in tmp_path.iterdir()] == [".a.lock"]


def test_pieces_are_joined_to_expected_file(tmp_path: Path) -> None:
    pieces = [tmp_path / name for name in ("first", "second")]
    for piece in pieces:
        piece.write_text(piece.name)
    digest = hashlib.sha256(b"firstsecond").hexdigest()
    whole = join_pieces(pieces, tmp_path / "whole", digest)
    assert whole.read_text() == "firstsecond" and whole.suffix == ".gguf"
    with pytest.raises(ConfigError, match=f"first: expected pieces .* {digest}, found [0-9a-f]"):
        join_pieces(pieces[:1], tmp_path / "other", digest)
    assert not (tmp_path / "other").exists()


def test_conversion_error_names_invalid_model_file(tmp_path: Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"broken\.gguf: not converted: "):
        convert_gguf(source, tmp_path / "a")
    assert not (tmp_path / "a").exists()

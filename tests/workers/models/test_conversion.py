"""A model's folder is written once and whole, whoever asks at once and whoever is killed."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from workers.models.conversion import convert_gguf, lock_file, write_once

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


def test_several_at_once_write_once(tmp_path: Path) -> None:
    """Two processes do it once, by a lock."""
    target = tmp_path / "models" / "a"
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        with lock_file(target).open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever else asks waits
        (folder / "file").write_text("whole")

    write_once(target, write)
    write_once(target, write)
    assert len(written) == 1
    assert (target / "file").read_text() == "whole"
    with lock_file(target).open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_killed_writer_leaves_nothing_half(tmp_path: Path) -> None:
    """Nor does it keep the next one from writing."""
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


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_once(tmp_path / "a", write)
    assert [file.name for file in tmp_path.iterdir()] == [".a.lock"]


def test_what_is_no_model_is_refused_with_its_name(tmp_path: Path) -> None:
    """The process's last words are told."""
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"broken\.gguf: not converted: "):
        convert_gguf(source, tmp_path / "a")
    assert not (tmp_path / "a").exists()

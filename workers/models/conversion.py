"""Converts a model in one GGUF file to a folder that any engine loads.

Weights become bfloat16 safetensors, with tokenizer and chat template beside them. The conversion
runs in a process of its own, so that its memory of more than a gigabyte is freed when it ends. It
runs once, also if several processes start it at once: the process with the lock writes, and the
folder gets its name when it is complete. The system releases the lock of a process that is killed.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import ConfigError

FORM = "bf16"  # part of the folder's name; change it when `_write` writes something else
_TIMEOUT_S = 600.0


def convert_gguf(source: Path, target: Path) -> Path:
    """Convert the GGUF file unless `target` exists; return `target`. Raises ConfigError."""
    if target.exists():
        return target
    command = [sys.executable, "-m", "workers.models.conversion", str(source), str(target)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env=env, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{target}: not written after {_TIMEOUT_S:.0f} s") from error
    if result.returncode:
        raise ConfigError(f"{source}: not converted: {result.stderr.strip()[-1_000:]}")
    return target


def join_pieces(pieces: Sequence[Path], folder: Path, sha256: str) -> Path:
    """Join the pieces of a GGUF file into a new file in `folder`, and return it. Raises ConfigError
    if the file is another one than expected.
    """

    def write(draft: Path) -> None:
        digest = hashlib.sha256()
        with (draft / "model.gguf").open("wb") as whole:
            for piece in pieces:
                content = piece.read_bytes()
                digest.update(content)
                whole.write(content)
        if digest.hexdigest() != sha256:
            raise ConfigError(
                f"{pieces[0]}: expected pieces of a file with the SHA-256 digest {sha256}, found "
                f"{digest.hexdigest()}"
            )

    write_once(folder, write)
    return folder / "model.gguf"


def write_once(target: Path, write: Callable[[Path], object]) -> None:
    """Write the folder `target`, unless another process has written it or is writing it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(lock_file(target)):
        if target.exists():
            return
        draft = target.with_name(f".{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)  # left by a writer that was killed
        draft.mkdir()
        try:
            write(draft)
            os.rename(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def lock_file(target: Path) -> Path:
    """Return the file whose lock the writer of the target has."""
    return target.with_name(f".{target.name}.lock")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    names = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **names, dtype="bfloat16", quantization_config=unpacked
    )
    model.save_pretrained(folder, safe_serialization=True)
    AutoTokenizer.from_pretrained(**names).save_pretrained(folder)


def main(source: Path, target: Path) -> None:
    """Write the converted model, unless another process does."""
    write_once(target, lambda folder: _write(source, folder))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

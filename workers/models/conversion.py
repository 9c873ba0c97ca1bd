"""A model in one GGUF file, rewritten as a folder that any engine loads.

Weights become bfloat16 safetensors, with tokenizer and chat template beside them. A process of its
own does it, which takes more than a gigabyte with it when it ends. It is done once, also when
several processes ask at once: whoever holds the lock writes, and the folder gets its name when it
is whole. The system drops the lock of a process that is killed.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import ConfigError

FORM = "bf16"  # part of the folder's name: whoever changes what is written changes it, too
_TIMEOUT_S = 600.0


def convert_gguf(source: Path, target: Path) -> Path:
    """`target`, made of the GGUF file if it is not there yet; raises ConfigError."""
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


def write_once(target: Path, write: Callable[[Path], object]) -> None:
    """Have `target` written, unless another process has done so or does it now."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(lock_file(target)):
        if target.exists():
            return
        draft = target.with_name(f".{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)  # of a writer that was killed
        draft.mkdir()
        try:
            write(draft)
            os.rename(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def lock_file(target: Path) -> Path:
    """Whoever writes the target holds this file's lock."""
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

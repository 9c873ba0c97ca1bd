"""Checks that readers of a new schema version can read all records of older versions.

That is a registry's BACKWARD_TRANSITIVE. `schemas/history/released.json` names the versions of the
last release; each of them is current or in the history, and readable. `make check` runs this; no
serving process does. `make schemas` also writes `schemas/marks.json`, the fingerprint of each
record's schema; with `--release` this writes `released.json`, too.
"""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import avro.schema
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

from schemas.codec import (
    HISTORY_DIR,
    MARKS_FILE,
    Schema,
    full_schema,
    record_names,
    schema_fingerprint,
)

RELEASED_FILE = HISTORY_DIR / "released.json"


def unreadable(reader: Schema, writer: Schema) -> str:
    """Return why `reader` cannot read records written with `writer`; empty if it can."""
    result = ReaderWriterCompatibilityChecker().get_compatibility(
        avro.schema.parse(json.dumps(reader)), avro.schema.parse(json.dumps(writer))
    )
    if result.compatibility is SchemaCompatibilityType.compatible:
        return ""
    places = ", ".join(sorted(result.locations))
    kinds = ", ".join(dict.fromkeys(kind.value for kind in result.incompatibilities))
    return f"{kinds.replace('_', ' ')}: {', '.join(sorted(result.messages))} (at {places})"


def current_marks() -> dict[str, str]:
    """Return the fingerprint of each record's current version, in hexadecimal."""
    schemas = {name: full_schema(name) for name in record_names()}
    return {
        name: schema_fingerprint(schema).hex()
        for name, schema in schemas.items()
        if schema["type"] == "record"
    }


def released_marks(path: Path = RELEASED_FILE) -> dict[str, str]:
    """Return the fingerprints of the last release."""
    return dict(json.loads(path.read_text())["records"])


def older_versions(history: Path = HISTORY_DIR) -> dict[str, dict[str, Schema]]:
    """Return every version in the history, by record and fingerprint."""
    versions: dict[str, dict[str, Schema]] = {}
    for path in sorted(history.glob("*.avsc")):
        name, mark, _ = path.name.split(".")
        versions.setdefault(name, {})[mark] = json.loads(path.read_text())
    return versions


def incompatibilities(history: Path = HISTORY_DIR) -> Iterator[str]:
    """Yield everything that would make records of a former version unreadable."""
    current, older = current_marks(), older_versions(history)
    for name, mark in released_marks(history / RELEASED_FILE.name).items():
        if mark != current.get(name) and mark not in older.get(name, {}):
            yield (
                f"{name}: version {mark} was released, and is neither current nor in "
                "schemas/history; run `make schemas` and commit what it writes"
            )
    for name, versions in older.items():
        for mark, schema in versions.items():
            if name not in current:
                yield f"{name}: is gone, and records of version {mark} are in the log"
            elif why := unreadable(full_schema(name), schema):
                yield f"{name}: the current version cannot read version {mark}: {why}"


def marks_text() -> str:
    """Return the text of `schemas/marks.json`: to compute it would slow each process's start."""
    return json.dumps(current_marks(), indent=2) + "\n"


if __name__ == "__main__":
    MARKS_FILE.write_text(marks_text())
    if "--release" in sys.argv:
        release = {"version": version("trivium"), "records": current_marks()}
        RELEASED_FILE.write_text(json.dumps(release, indent=1) + "\n")

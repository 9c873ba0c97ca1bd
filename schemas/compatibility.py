"""What a change of a schema must keep: readers of the new version read every record that is there.

That is a registry's BACKWARD_TRANSITIVE. `schemas/history/released.json` names the versions of the
last release; each of them is current or in the history, and readable. Run by `make check`, and
never on the path.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import avro.schema
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

from schemas.codec import HISTORY_DIR, Schema, full_schema, record_names, schema_fingerprint

RELEASED_FILE = HISTORY_DIR / "released.json"


def unreadable(reader: Schema, writer: Schema) -> str:
    """Why readers of one schema cannot read what was written with another; empty if they can."""
    result = ReaderWriterCompatibilityChecker().get_compatibility(
        avro.schema.parse(json.dumps(reader)), avro.schema.parse(json.dumps(writer))
    )
    if result.compatibility is SchemaCompatibilityType.compatible:
        return ""
    places = ", ".join(sorted(result.locations))
    kinds = ", ".join(dict.fromkeys(kind.value for kind in result.incompatibilities))
    return f"{kinds.replace('_', ' ')}: {', '.join(sorted(result.messages))} (at {places})"


def current_marks() -> dict[str, str]:
    """Each record's current version, by its fingerprint in hexadecimal."""
    schemas = {name: full_schema(name) for name in record_names()}
    return {
        name: schema_fingerprint(schema).hex()
        for name, schema in schemas.items()
        if schema["type"] == "record"
    }


def released_marks(path: Path = RELEASED_FILE) -> dict[str, str]:
    """The same of the last release."""
    return dict(json.loads(path.read_text())["records"])


def older_versions(history: Path = HISTORY_DIR) -> dict[str, dict[str, Schema]]:
    """Every version in the history, by record and fingerprint."""
    versions: dict[str, dict[str, Schema]] = {}
    for path in sorted(history.glob("*.avsc")):
        name, mark, _ = path.name.split(".")
        versions.setdefault(name, {})[mark] = json.loads(path.read_text())
    return versions


def incompatibilities(history: Path = HISTORY_DIR) -> Iterator[str]:
    """Everything that would keep a record of a former version from being read."""
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


if __name__ == "__main__":  # at a release
    from importlib.metadata import version

    release = {"version": version("trivium"), "records": current_marks()}
    RELEASED_FILE.write_text(json.dumps(release, indent=1) + "\n")

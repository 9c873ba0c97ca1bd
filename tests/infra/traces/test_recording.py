"""The file of a recording: what is written is read, and what is none is refused."""

import json
from pathlib import Path

import fastavro
import pytest

from infra.traces.recording import LINE, RECORD, VERSION, RecordingRow, open_recording, write
from schemas.codec import Codec
from schemas.errors import RecordError
from tests.streams import builders

ROWS = [
    RecordingRow(LINE, "router-a", 5, 7, "requests", 1, 9, 1_000, -3, 77, b"value"),
    RecordingRow(RECORD, topic="decisions", now_ms=3),
]


def test_recording_reads_back_written_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    write(path, {"since_ms": 3}, ROWS)
    with open_recording(path) as recording:
        assert recording.about["since_ms"] == 3
        assert list(recording.rows()) == ROWS
    assert list(tmp_path.iterdir()) == [path]


def test_recording_embeds_schemas_of_its_values(tmp_path: Path) -> None:
    """Other programs read the file without this project's schemas."""
    request = builders.request("r1")
    write(tmp_path / "a.avro", {}, [RecordingRow(LINE, value=Codec().encode(request))])
    with (tmp_path / "a.avro").open("rb") as file:
        reader = fastavro.reader(file)
        schemas = json.loads(reader.metadata["trivium.schemas"])
        (row,) = reader
    assert schemas["Request"]["name"] == "Request"
    assert row["value"][:2] == b"\xc3\x01"


def test_recording_leaves_no_file_after_failed_write(tmp_path: Path) -> None:
    def rows() -> object:
        yield ROWS[0]
        raise RecordError("gone")

    with pytest.raises(RecordError, match="gone"):
        write(tmp_path / "a.avro", {}, rows())  # type: ignore[arg-type]  # a generator of rows
    assert not list(tmp_path.iterdir())


def test_recording_refuses_other_files_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    with pytest.raises(RecordError, match="cannot be read: No such file"), open_recording(path):
        pass
    path.write_bytes(b"anything")
    with pytest.raises(RecordError, match="found no Avro file"), open_recording(path):
        pass
    schema = fastavro.parse_schema({"type": "record", "name": "Other", "fields": []})
    with path.open("wb") as out:
        fastavro.writer(out, schema, [{}])
    with pytest.raises(RecordError, match="another Avro file"), open_recording(path):
        pass
    write(path, {"version": VERSION + 1}, [])
    with (
        pytest.raises(RecordError, match=f"version {VERSION + 1} of the format"),
        open_recording(path),
    ):
        pass


def test_recording_reports_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    write(path, {}, ROWS * 1_000)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(RecordError, match="cut or damaged"), open_recording(path) as recording:
        list(recording.rows())

"""What `trivium adapters` shows, from a fleet at hand."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from infra.cli.operate.adapters import rows_of, table_of, with_files
from schemas.fleet import FleetView
from schemas.model.adapters import CONFIG_FILE
from schemas.records import Load, Role
from schemas.settings import ModelSettings
from tests.infra.cli.trivium_runner import trivium_here
from tests.streams.builders import T0, beat, capability, registration


def fleet() -> FleetView:
    """Two workers of one model with two adapters, and one of another model."""
    view = FleetView()
    for number, (model, names, loaded) in enumerate(
        [("a", ("law", "tax"), ("tax",)), ("a", ("law", "tax"), ("tax", "gone")), ("b", (), ())]
    ):
        worker = f"replica-{number}"
        engine = replace(capability(worker), model=model, adapters=names, adapters_max=2)
        record = registration(worker, Role.REPLICA, partition=number, capability=engine)
        view.apply(record, number, T0)
        view.apply(beat(worker, 1, {}, at_ms=T0, load=Load(adapters=loaded)), 10 + number, T0)
    return view


def test_rows_say_which_workers_have_each_adapter() -> None:
    rows = rows_of(fleet(), T0)
    both = ["replica-0", "replica-1"]
    assert rows == [
        {"adapter": "law", "model": "a", "workers": both, "loaded": []},
        {"adapter": "tax", "model": "a", "workers": both, "loaded": both},
    ]
    assert printed([]) == ["no worker has an adapter; name some in model.adapters of the settings"]


def printed(rows: list[dict[str, Any]]) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120).print(table_of(rows))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_rows_have_folders_and_ranks_of_settings(tmp_path: Path) -> None:
    """Also those of adapters that no worker has, or whose files are not here."""
    law, lost_folder = tmp_path / "law", tmp_path / "gone"
    law.mkdir()
    (law / CONFIG_FILE).write_text('{"r": 16}')
    models = [
        ModelSettings(path="a", adapters={"law": str(law), "gone": str(lost_folder)}),
        ModelSettings(path="b"),
    ]
    rows = with_files(rows_of(fleet(), T0), models)
    summaries = [(row["adapter"], row["rank"], row["folder"], row["workers"]) for row in rows]
    both = ["replica-0", "replica-1"]
    assert summaries == [
        ("gone", 0, str(lost_folder), []),
        ("law", 16, str(law), both),
        ("tax", 0, "", both),
    ]
    lines = printed([{**row, "folder": "", "requests": 7} for row in rows])
    assert lines == [
        "adapter model rank loaded by can be loaded by folder requests",
        "gone a - none none 7",
        "law a 16 none replica-0, replica-1 7",
        "tax a - replica-0, replica-1 replica-0, replica-1 7",
    ]


def test_adapters_command_needs_a_log() -> None:
    code, _, errors = trivium_here("adapters", "--bootstrap", "127.0.0.1:1")
    assert code == 2 and "127.0.0.1:1" in errors

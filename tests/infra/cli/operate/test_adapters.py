"""What `trivium adapters` shows, from a fleet at hand."""

import io
from dataclasses import replace

from rich.console import Console

from infra.cli.operate.adapters import rows_of, table_of
from schemas.fleet import FleetView
from schemas.records import Load, Role
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
    out = io.StringIO()
    Console(file=out, width=120).print(table_of(rows))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines == [
        "adapter model loaded by can be loaded by",
        "law a none replica-0, replica-1",
        "tax a replica-0, replica-1 replica-0, replica-1",
    ]
    Console(file=out, width=120).print(table_of([]))
    assert "no worker has an adapter" in out.getvalue()


def test_adapters_command_needs_a_log() -> None:
    code, _, errors = trivium_here("adapters", "--bootstrap", "127.0.0.1:1")
    assert code == 2 and "127.0.0.1:1" in errors

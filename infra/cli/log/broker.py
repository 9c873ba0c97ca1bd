"""Implements `trivium broker`: the Kafka node that Trivium runs itself."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.options import AsJson, Config, Quiet, settings_from
from infra.terminal.output import print_json

if TYPE_CHECKING:
    from infra.broker.node import Broker

app = typer.Typer(
    help="Start and stop Trivium's own Kafka broker.",
    no_args_is_help=True,
)


@app.command(epilog="Example: TRIVIUM_BROKER_PORT=0 trivium broker start")
def start(config: Config = None, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Start the broker in the background, and wait until it answers."""
    broker = _broker(config)
    before = broker.is_running()
    bootstrap = broker.start()
    if as_json:
        print_json(asdict(broker.status()))
    elif not quiet:
        print(f"Kafka {'already runs' if before else 'started'} at {bootstrap}")


@app.command(epilog="Example: trivium broker stop --erase --yes && trivium broker start")
def stop(
    erase: Annotated[
        bool, typer.Option("--erase", help="Also delete all its data, after a question.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: Config = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Stop the broker with a controlled shutdown; its data stays."""
    broker = _broker(config)
    if erase:
        _erase(broker, yes=yes, as_json=as_json)
        return
    stopped = broker.stop()
    if as_json:
        print_json({"stopped": stopped})
    elif not quiet:
        print("Kafka stopped" if stopped else "Kafka does not run here")


def _erase(broker: "Broker", *, yes: bool, as_json: bool) -> None:
    if not yes:
        typer.confirm(f"Delete every record in {broker.folder}?", abort=True, err=True)
    broker.reset()
    if as_json:
        print_json({"folder": str(broker.folder), "empty": True})
    else:
        print(f"{broker.folder} is empty")


@app.command(epilog="Example: trivium broker status --json | jq -r .bootstrap")
def status(config: Config = None, as_json: AsJson = False) -> None:
    """Show whether the broker runs, where, and its data's size; exit code 1 if it does not run."""
    broker = _broker(config).status()
    if as_json:
        print_json(asdict(broker))
    elif broker.running:
        state = "answers" if broker.answers else "does not answer yet"
        size_mb = broker.data_bytes / 1e6
        print(f"Kafka at {broker.bootstrap} {state}; pid {broker.pid}, {size_mb:.1f} MB of data")
        print(f"in {broker.folder}")
    elif broker.answers:
        print(f"Trivium's own Kafka does not run, but another one answers at {broker.bootstrap}")
    else:
        print("Kafka does not run here; start it with `trivium broker start`")
    if not broker.running:
        raise typer.Exit(1)


def _broker(config: Config) -> "Broker":
    from infra.broker.node import Broker

    return Broker(settings_from(config).broker)

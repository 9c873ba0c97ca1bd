"""Defines options that several commands share, and reads the settings that they give.

The settings are imported when a command needs them: help does not.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.stack.configuration import Settings
    from schemas.records import Role

Config = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file.", show_default="trivium.toml if it is there"),
]
Bootstrap = Annotated[
    str | None,
    typer.Option("--bootstrap", metavar="HOST:PORT", help="Address of a running Kafka cluster."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
Seed = Annotated[int, typer.Option(help="Seed of arrival times and texts.")]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="OPENAI_API_KEY", show_default=False, help="API key, if gateway.api_keys is set."
    ),
]
Engine = Annotated[str | None, typer.Option(help="Engine: vllm or sim.", show_default="vllm")]

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # addresses to listen on, with those to call


def in_panel(panel: str) -> Callable[..., Any]:
    """Return an option in a help panel: `in_panel("Live")(help="Per conversation.", min=2)`."""
    return functools.partial(typer.Option, rich_help_panel=panel)


def settings_from(
    config: Path | None,
    bootstrap: str | None = None,
    *,
    models: Sequence[str] = (),
    **sections: dict[str, Any],
) -> "Settings":
    """Return the settings of file, environment and flags; flags that are None change nothing.

    With `models`, there is one model for each of these paths.
    """
    from infra.stack.configuration import load

    flags = {"log": {"bootstrap": bootstrap}, **sections}
    return load(config, flags=flags, models=models)


def names_broker(settings: "Settings") -> bool:
    """Return whether file, environment or flags name another broker than Trivium's own."""
    from schemas.settings import LogSettings

    return settings.log.bootstrap != LogSettings().bootstrap


def settings_of_running(config: Path | None, bootstrap: str | None = None) -> "Settings":
    """Return the settings as above, with the broker that serves here.

    It is the one of `bootstrap`, of the stack that runs here, of the settings, or Trivium's own.
    """
    from infra.stack.statefile import read_state

    settings = settings_from(config, bootstrap)
    if bootstrap is not None:
        return settings
    if (stack := read_state()) is not None:
        address = stack.bootstrap
    elif names_broker(settings):
        return settings
    else:
        from infra.broker.node import Broker

        broker = Broker(settings.broker).status()
        if not broker.running:
            return settings
        address = broker.bootstrap
    return dataclasses.replace(settings, log=dataclasses.replace(settings.log, bootstrap=address))


def check_collection(name: str) -> None:
    """Raise ConfigError where `--collection` is no valid name of a collection."""
    from schemas.rules.sizes import COLLECTION_CHARS_MAX, is_collection

    if not is_collection(name):
        raise ConfigError(
            f"--collection: expected 1 to {COLLECTION_CHARS_MAX} characters without a slash, "
            f"found {name!r}"
        )


def gateway_url(config: Path | None) -> str:
    """Return the URL of the first gateway that runs here, or else of the settings' gateway."""
    from infra.stack.statefile import read_state

    state = read_state()
    if state is not None and state.gateways:
        return state.gateways[0]
    gateway = settings_from(config).gateway
    return f"http://{_ANYWHERE.get(gateway.host, gateway.host)}:{gateway.port}"


def roles_from(names: list[str], option: str) -> "list[Role]":
    """Return the roles in an option, repeated or with commas; raises ConfigError with its name."""
    from schemas.records import Role

    non_llm = (Role.UNKNOWN, Role.RETRIEVAL, Role.EMBEDDING)  # the latter have own commands
    expected = [role.value for role in Role if role not in non_llm]
    role_names = [name.strip() for value in names for name in value.split(",")]
    for name in role_names:
        if name not in expected:
            raise ConfigError(f"{option}: expected {', '.join(expected)}, found {name!r}")
    return [Role(name) for name in dict.fromkeys(role_names)]


def parse_overrides(policy: str, changed: list[str]) -> dict[str, str]:
    """Return `--policy` and each `--set NAME=VALUE`, by name; raises ConfigError."""
    overrides = {"policy": policy} if policy else {}
    for text in changed:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set: expected NAME=VALUE, found {text!r}")
        overrides[name.strip()] = value.strip()
    return overrides

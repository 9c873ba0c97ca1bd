"""Implements `trivium run`: one process in the foreground, a worker, router, gateway and so on.

SIGTERM and Ctrl-C drain; a second signal ends at once. Exit code 2: the settings are wrong, a
restart cannot help; 1: a restart may help. `infra/stack/launcher.py` relies on both.
"""

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    Bootstrap,
    Config,
    in_panel,
    parse_overrides,
    roles_from,
    settings_from,
)
from infra.processes import garbage, log_lines
from infra.processes.identity import DRAIN_MAX_S, PRIVATE
from schemas.errors import ClientError, ConfigError, TopicError, TriviumError
from schemas.state_folder import home

if TYPE_CHECKING:
    from infra.stack.configuration import Settings
    from schemas.codec import Codec
    from schemas.records import Role
    from workers.retrieval.settings import ShardPlace

_HOPELESS = (ClientError, ConfigError, TopicError)
UntilStopped = Callable[[asyncio.Event], Awaitable[None]]
Process = Callable[..., Awaitable[None]]  # of settings and a name; runs until `stop` is set
Kind = Annotated[
    str,
    typer.Argument(
        metavar="KIND", help="Kind: worker, router, gateway, bridge, retrieval or embedding."
    ),
]
_WORKER, _ROUTER = in_panel("Of a worker"), in_panel("Of a router")
_GATEWAY = in_panel("Of a gateway")
_RETRIEVAL, _MODEL = in_panel("Of a retrieval worker"), in_panel("Of a worker or embedding worker")
_OPTIONS = {  # by kind, the options that only it has
    "worker": ("role", "engine", "model"),
    "router": ("shadow", "policy", "set"),
    "gateway": ("host", "port"),
    "bridge": (),
    "retrieval": ("shard", "device"),
    "embedding": ("model",),
}


def run(
    kind: Kind,
    member_id: Annotated[
        str | None, typer.Option("--id", help="Name in the fleet.", show_default="kind and host")
    ] = None,
    role: Annotated[
        list[str] | None,
        _WORKER(help="Role: prefill, decode or replica; several with a comma.", show_default=False),
    ] = None,
    engine: Annotated[str | None, _WORKER(help="Engine: vllm or sim.", show_default="vllm")] = None,
    shadow: Annotated[
        bool, _ROUTER("--shadow", help="Decide beside the live routers, without effect.")
    ] = False,
    policy: Annotated[str, _ROUTER(help="Policy of a shadow.", show_default="theirs")] = "",
    changed: Annotated[
        list[str] | None,
        _ROUTER("--set", metavar="NAME=VALUE", help="Setting of \\[router] of a shadow."),
    ] = None,
    host: Annotated[str | None, _GATEWAY(help="Address to listen on.")] = None,
    port: Annotated[int | None, _GATEWAY(help="Port to listen on; 0: any free port.")] = None,
    shard: Annotated[
        str | None,
        _RETRIEVAL(
            help="Shard of the documents, counted from 0.", metavar="N/OF", show_default="0/1"
        ),
    ] = None,
    device: Annotated[
        str | None, _RETRIEVAL(help="Device: cpu, cuda or auto.", show_default="cpu")
    ] = None,
    model: Annotated[
        str | None,
        _MODEL(
            help="Of a worker: name of its model, if the settings have several. Of an embedding "
            "worker: all-minilm-l6-v2, hash, the folder of a model, or the name of another pool.",
            show_default="the first model; all-minilm-l6-v2, or hash beside simulated engines",
        ),
    ] = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    log_level: Annotated[
        str, typer.Option("--log-level", help="Level: debug, info, warning or error.")
    ] = "info",
) -> None:
    """Run one process in the foreground.

    It is a worker, router, gateway, bridge, or a worker of retrieval.

    SIGTERM and Ctrl-C let it finish its work; a second signal ends it at once. Exit code 2: the
    settings are wrong, a restart cannot help; 1: a restart may help.

    A retrieval worker has a shard of all collections; every shard needs one. An embedding worker
    cuts documents into passages and makes vectors. A bridge answers prompts from topics. Several
    routers share the sessions, several bridges the partitions, several embedding workers the
    documents. A router with `--shadow` follows the journals of all routers, and writes where it
    would have placed their requests, for `trivium replay log --shadow`.

    Examples: `trivium run worker --role prefill --engine sim --bootstrap kafka:9092`,
    `trivium run worker --role prefill,decode --model small`,
    `trivium run gateway --port 8001 --id gateway-1`,
    `trivium run retrieval --shard 0/2 --id left-a`, `trivium run embedding --model ./my-embedder`,
    `trivium run router --shadow --policy static --set local_share=0.5`
    """
    options = {
        **{"role": role, "engine": engine, "host": host, "port": port, "shard": shard},
        **{"device": device, "model": model, "set": changed},
        **{"shadow": shadow or None, "policy": policy or None},
    }
    _check_options(kind, {name for name, value in options.items() if value is not None})
    settings = settings_from(
        config,
        bootstrap,
        worker={"engine": engine},
        retrieval={"device": device},
        gateway={"host": host, "port": port},
    )
    match kind:
        case "worker":
            roles = roles_from(role or [], "--role")
            settings = settings.for_model(model or "")
            process: Process = partial(_worker, roles=roles)
            member_id = member_id or _default_id(roles[0].value)
        case "router":
            overrides = parse_overrides(policy, changed or [])
            if overrides and not shadow:
                raise ConfigError(
                    "--policy, --set: expected with --shadow; others have a settings file"
                )
            process = partial(_shadow, overrides=overrides) if shadow else _router
            member_id = member_id or _default_id("shadow" if shadow else "router")
        case "retrieval":
            from workers.retrieval.settings import ShardPlace

            place = ShardPlace.parse(shard or "0/1")
            process = partial(_retrieval, place=place)
            member_id = member_id or f"{_default_id('retrieval')}-{place.shard}"
        case "embedding":
            settings, pool = _embedding_pool(settings, model or "")
            process = partial(_embedding, pool=pool)
            member_id = member_id or _default_id(f"embedding-{pool}" if pool else kind)
        case _:
            process = _gateway if kind == "gateway" else _bridge
    _serve(partial(_with_codec, process, settings, member_id or _default_id(kind)), log_level)


def _check_options(kind: str, names: set[str]) -> None:
    """Raise ConfigError for an unknown kind, or options that it does not have."""
    if kind not in _OPTIONS:
        raise ConfigError(f"run: expected one of {', '.join(_OPTIONS)}, found {kind!r}")
    if wrong := sorted(names - set(_OPTIONS[kind])):
        kinds = " or ".join(name for name, options in _OPTIONS.items() if wrong[0] in options)
        raise ConfigError(f"--{wrong[0]}: expected with run {kinds}, found with run {kind}")
    if kind == "worker" and "role" not in names:
        raise ConfigError("--role: expected prefill, decode or replica, found none")


async def _with_codec(
    process: Process, settings: "Settings", name: str, stop: asyncio.Event
) -> None:
    from streams.log.registry import make_codec

    codec = await asyncio.to_thread(make_codec, settings.log)
    await process(settings, name, stop=stop, codec=codec)


async def _worker(settings: "Settings", name: str, *, roles: "list[Role]", **run: Any) -> None:
    from infra.stack.engine_source import engine_source
    from schemas.model.parsers import parsers_of
    from workers.runtime import run_worker

    resolved = await asyncio.to_thread(_with_adapters, settings)
    parsers = await asyncio.to_thread(parsers_of, resolved.model)
    logging.getLogger("trivium").info(
        "tool parser: %s, reasoning parser: %s", parsers.tool, parsers.reasoning
    )
    engine = engine_source(resolved, name, roles)
    parts = resolved.log, resolved.worker, resolved.model
    await run_worker(*parts, worker_id=name, roles=roles, engine=engine, **run)


async def _retrieval(
    settings: "Settings", name: str, *, place: "ShardPlace", stop: asyncio.Event, codec: "Codec"
) -> None:
    from workers.retrieval.worker import RetrievalWorker

    await RetrievalWorker(settings.log, settings.retrieval, place, name, codec).run(stop)


def _embedding_pool(settings: "Settings", model: str) -> "tuple[Settings, str]":
    """Return the settings, and the name of the pool whose model this is; the model of no other pool
    is the first one's."""
    embedding = settings.embedding
    if model in [pool.public_name for pool in embedding.pools]:
        return settings, model
    if model:
        embedding = dataclasses.replace(embedding, model=model)
    return dataclasses.replace(settings, embedding=embedding), ""


def _embedders(settings: "Settings") -> list[str]:
    """Return the names of the embedding models; none if there is only one, which workers tell."""
    if not settings.embedding.pools:
        return []
    from workers.embed.embedders.choose import public_embedder

    first = public_embedder(settings.embedding, settings.worker.engine)
    return [first, *(pool.public_name for pool in settings.embedding.pools)]


async def _embedding(settings: "Settings", name: str, **run: Any) -> None:
    from workers.embed.worker import run_embedding

    resolved = await asyncio.to_thread(_with_model_folder, settings)
    parts, engine = (resolved.log, resolved.embedding, resolved.model), resolved.worker.engine
    await run_embedding(*parts, engine=engine, worker_id=name, **run)


async def _router(settings: "Settings", name: str, **run: Any) -> None:
    from streams.agents.lifecycle import run_router

    deadline_ms_max = settings.gateway.deadline_ms_max
    parts = settings.log, settings.router
    await run_router(*parts, router_id=name, deadline_ms_max=deadline_ms_max, **run)


async def _shadow(
    settings: "Settings", name: str, *, overrides: dict[str, str], **run: Any
) -> None:
    from infra.replay.shadowing import run_shadow

    snapshot_ms = settings.router.snapshot_ms
    await run_shadow(settings.log, overrides, shadow_id=name, snapshot_ms=snapshot_ms, **run)


async def _gateway(settings: "Settings", name: str, **run: Any) -> None:
    from streams.calls.stream.event_key import event_key
    from streams.gateway.app import run_gateway

    resolved = await asyncio.to_thread(_with_model_folder, settings)
    key = event_key(resolved.gateway.event_key, home())
    gateway = dataclasses.replace(resolved.gateway, event_key=key)
    embedders = _embedders(resolved)
    await run_gateway(
        *(resolved.log, gateway, resolved.models), gateway_id=name, embedders=embedders, **run
    )


async def _bridge(settings: "Settings", name: str, **run: Any) -> None:
    from streams.bridge.process import run_bridge

    resolved = await asyncio.to_thread(_with_model_folder, settings)
    parts = resolved.log, resolved.bridge, resolved.gateway, resolved.models
    await run_bridge(*parts, bridge_id=name, embedders=_embedders(resolved), **run)


def _default_id(kind: str) -> str:
    return f"{kind}-{socket.gethostname()}"


def _with_model_folder(settings: "Settings") -> "Settings":
    """Return the settings with the folder of each model, downloaded or found, and its name."""
    from workers.models.folder import resolve_model

    def log_progress(what: str) -> None:
        logging.getLogger("trivium").info("%s", what)

    engine = settings.worker.engine
    models = [resolve_model(model, engine, report=log_progress) for model in settings.models]
    return settings.with_models(models)


def _with_adapters(settings: "Settings") -> "Settings":
    """Return the settings as `_with_model_folder` does, and with the folders of adapters."""
    from schemas.model.adapters import resolve_adapters

    resolved = _with_model_folder(settings)
    return resolved.with_models([resolve_adapters(model) for model in resolved.models])


def _serve(process: UntilStopped, log_level: str) -> None:
    import uvloop

    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise ConfigError(
            f"--log-level: expected debug, info, warning or error, found {log_level!r}"
        )
    log_lines.configure_logging(level)
    os.umask(PRIVATE)
    try:
        uvloop.run(_until_stopped(process))
    except _HOPELESS:
        raise
    except TriviumError as error:
        logging.getLogger("trivium").error("%s: %s", error.code, error.message)
        sys.exit(1)
    except OSError:  # a restart may help, and the log has the traceback
        logging.getLogger("trivium").exception("ended by the system")
        sys.exit(1)


def _until_stopped(
    process: UntilStopped,
) -> Coroutine[Any, Any, None]:
    async def main() -> None:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():  # a second signal
                os._exit(1)
            stop.set()
            loop.call_later(DRAIN_MAX_S, os._exit, 1)  # a drain may wait for an absent broker

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        garbage.defer_gc(loop)
        await process(stop)

    return main()

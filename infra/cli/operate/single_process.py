"""Implements `trivium worker`, `router`, `gateway`: one process each, in the foreground.

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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    Bootstrap,
    Config,
    Engine,
    parse_overrides,
    roles_from,
    settings_from,
)
from infra.processes import garbage, log_lines
from infra.processes.identity import PRIVATE
from schemas.errors import ClientError, ConfigError, TopicError, TriviumError
from schemas.state_folder import home

if TYPE_CHECKING:
    from infra.stack.configuration import Settings

_DRAIN_MAX_S = 60
_HOPELESS = (ClientError, ConfigError, TopicError)
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
Id = Annotated[
    str | None, typer.Option("--id", help="Name in the fleet.", show_default="kind and host")
]


def worker(
    role: Annotated[
        list[str], typer.Option(help="prefill, decode or replica; several with a comma.")
    ],
    engine: Engine = None,
    member_id: Id = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one worker.

    Examples: `trivium worker --role prefill --engine sim --bootstrap kafka:9092`,
    `trivium worker --role prefill,decode`
    """
    roles = roles_from(role, "--role")
    settings = settings_from(config, bootstrap, worker={"engine": engine})
    name = member_id or _default_id(roles[0].value)

    async def run(stop: asyncio.Event) -> None:
        from infra.stack.engine_source import engine_source
        from streams.log.registry import make_codec
        from workers.runtime import run_worker

        resolved = await asyncio.to_thread(_with_model_folder, settings)
        await run_worker(
            resolved.log,
            resolved.worker,
            resolved.model,
            worker_id=name,
            roles=roles,
            engine=engine_source(resolved, name, roles),
            stop=stop,
            codec=await asyncio.to_thread(make_codec, resolved.log),
        )

    _serve(run, log_level)


def retrieval(
    shard: Annotated[
        str, typer.Option(help="Which part of the documents, counted from 0.", metavar="N/OF")
    ] = "0/1",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or auto.", show_default="cpu")
    ] = None,
    member_id: Id = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one retrieval worker: a shard of all collections, searched for prefill and decode.

    Every shard needs one worker; more of them share its retrievals. Examples:
    `trivium retrieval`, `trivium retrieval --shard 0/2 --id left-a --bootstrap kafka:9092`
    """
    from workers.retrieval.settings import ShardPlace

    settings = settings_from(config, bootstrap, retrieval={"device": device})
    place = ShardPlace.parse(shard)
    name = member_id or f"{_default_id('retrieval')}-{place.shard}"

    async def run(stop: asyncio.Event) -> None:
        from streams.log.registry import make_codec
        from workers.retrieval.worker import RetrievalWorker

        codec = await asyncio.to_thread(make_codec, settings.log)
        await RetrievalWorker(settings.log, settings.retrieval, place, name, codec).run(stop)

    _serve(run, log_level)


def embedding(
    model: Annotated[
        str | None,
        typer.Option(
            help="all-minilm-l6-v2, hash, or the folder of a sentence-transformers model.",
            show_default="all-minilm-l6-v2; hash beside simulated engines",
        ),
    ] = None,
    member_id: Id = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one embedding worker: it cuts documents into passages and makes vectors, of searches too.

    Several share documents and searches. Examples: `trivium embedding`,
    `trivium embedding --model ./my-embedder --id embedding-a --bootstrap kafka:9092`
    """
    settings = settings_from(config, bootstrap, embedding={"model": model})
    name = member_id or _default_id("embedding")

    async def run(stop: asyncio.Event) -> None:
        from streams.log.registry import make_codec
        from workers.embed.worker import run_embedding

        resolved = await asyncio.to_thread(_with_model_folder, settings)
        await run_embedding(
            resolved.log,
            resolved.embedding,
            resolved.model,
            engine=resolved.worker.engine,
            worker_id=name,
            stop=stop,
            codec=await asyncio.to_thread(make_codec, resolved.log),
        )

    _serve(run, log_level)


def router(
    member_id: Id = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Decide beside those that route, and do nothing else.")
    ] = False,
    policy: Annotated[str, typer.Option(help="Of a shadow.", show_default="theirs")] = "",
    changed: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Of a shadow: this of \\[router]."),
    ] = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one router; several share the sessions among them.

    With `--shadow` it follows the journals of all routers, and writes where it would have placed
    their requests to `decisions.shadow`, for `trivium compare`. No member depends on a shadow.

    Examples: `trivium router --id router-1 --bootstrap kafka:9092`,
    `trivium router --shadow --policy static --set local_share=0.5`
    """
    settings, overrides = settings_from(config, bootstrap), parse_overrides(policy, changed or [])
    if overrides and not shadow:
        raise ConfigError("--policy, --set: expected with --shadow; others have a settings file")

    async def run(stop: asyncio.Event) -> None:
        from streams.log.registry import make_codec

        name = member_id or _default_id("shadow" if shadow else "router")
        codec = await asyncio.to_thread(make_codec, settings.log)
        if shadow:
            from infra.replay.shadowing import run_shadow

            await run_shadow(
                settings.log,
                overrides,
                shadow_id=name,
                stop=stop,
                codec=codec,
                snapshot_ms=settings.router.snapshot_ms,
            )
            return
        from streams.agents.lifecycle import run_router

        await run_router(
            settings.log,
            settings.router,
            router_id=name,
            stop=stop,
            codec=codec,
            deadline_ms_max=settings.gateway.deadline_ms_max,
        )

    _serve(run, log_level)


def gateway(
    member_id: Id = None,
    host: Annotated[str | None, typer.Option(help="Listen here.")] = None,
    port: Annotated[int | None, typer.Option(help="0: any free port.")] = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one gateway: the OpenAI API over HTTP.

    Example: `trivium gateway --host 0.0.0.0 --port 8001 --bootstrap kafka:9092`
    """
    settings = settings_from(config, bootstrap, gateway={"host": host, "port": port})

    async def run(stop: asyncio.Event) -> None:
        from streams.calls.stream.event_key import event_key
        from streams.gateway.app import run_gateway
        from streams.log.registry import make_codec

        name = member_id or _default_id("gateway")
        resolved = await asyncio.to_thread(_with_model_folder, settings)
        key = event_key(resolved.gateway.event_key, home())
        await run_gateway(
            resolved.log,
            dataclasses.replace(resolved.gateway, event_key=key),
            resolved.model,
            gateway_id=name,
            stop=stop,
            codec=await asyncio.to_thread(make_codec, resolved.log),
        )

    _serve(run, log_level)


def bridge(
    member_id: Id = None,
    config: Config = None,
    bootstrap: Bootstrap = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one bridge: prompts from topics, one answer each, to topics.

    Several share the partitions. Example:
    `trivium bridge --id bridge-1 --bootstrap kafka:9092`
    """
    settings = settings_from(config, bootstrap)

    async def run(stop: asyncio.Event) -> None:
        from streams.bridge.process import run_bridge
        from streams.log.registry import make_codec

        resolved = await asyncio.to_thread(_with_model_folder, settings)
        await run_bridge(
            resolved.log,
            resolved.bridge,
            resolved.gateway,
            resolved.model,
            bridge_id=member_id or _default_id("bridge"),
            stop=stop,
            codec=await asyncio.to_thread(make_codec, resolved.log),
        )

    _serve(run, log_level)


def _default_id(kind: str) -> str:
    return f"{kind}-{socket.gethostname()}"


def _with_model_folder(settings: "Settings") -> "Settings":
    """Return the settings with the model's folder, downloaded or found, and its name."""
    from workers.models.folder import resolve_model

    def log_progress(what: str) -> None:
        logging.getLogger("trivium").info("%s", what)

    model = resolve_model(settings.model, settings.worker.engine, report=log_progress)
    return dataclasses.replace(settings, model=model)


def _serve(run: Callable[[asyncio.Event], Awaitable[None]], log_level: str) -> None:
    import uvloop

    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise ConfigError(
            f"--log-level: expected debug, info, warning or error, found {log_level!r}"
        )
    log_lines.configure_logging(level)
    os.umask(PRIVATE)
    try:
        uvloop.run(_until_stopped(run))
    except _HOPELESS:
        raise
    except TriviumError as error:
        logging.getLogger("trivium").error("%s: %s", error.code, error.message)
        sys.exit(1)
    except OSError:  # a restart may help, and the log has the traceback
        logging.getLogger("trivium").exception("ended by the system")
        sys.exit(1)


def _until_stopped(run: Callable[[asyncio.Event], Awaitable[None]]) -> Coroutine[Any, Any, None]:
    async def main() -> None:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():  # a second signal
                os._exit(1)
            stop.set()
            loop.call_later(_DRAIN_MAX_S, os._exit, 1)  # a drain may wait for an absent broker

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        garbage.defer_gc(loop)
        await run(stop)

    return main()

"""Makes the AOT cache of Kafka's node: `python -m infra.stack.aot_cache`, at set-up.

A JVM writes such a cache when it ends: its classes as they are in memory (JEP 514), and how often
each method ran (JEP 515). The next JVM loads the classes at once and compiles the right methods
first. The node that writes the cache therefore serves a deployment of simulated engines under load.
The cache lies beside the jars that it was made from, and gets its final name once it is on the
disk; a JVM of another version starts without it. A formatted storage is saved beside it
(`broker/storage.py`).
"""

import asyncio
import logging
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from infra.broker import storage
from infra.broker.node import DEFAULT_LIBS, Broker, aot_cache
from infra.broker.section import BrokerSettings
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.errors import TriviumError
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from workers.config import WorkerSettings

_S = 300.0  # seconds, for a busy machine too: a JVM that is killed writes no cache
_CHATS, _STREAMS, _TOKENS = 500, 32, 64


def make(cache: Path) -> None:
    """Make the cache; a failure is reported and not raised, since brokers start without it."""
    cache.unlink(missing_ok=True)  # a JVM that uses a cache writes none
    draft = cache.with_name(f"{cache.name}.new")
    draft.unlink(missing_ok=True)
    try:
        _dump(draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(cache)
    except (OSError, TriviumError, httpx.HTTPError) as error:
        draft.unlink(missing_ok=True)
        sys.stderr.write(
            f"no AOT cache of Kafka was made, brokers start slower without it: {error}\n"
        )


def _dump(draft: Path) -> None:
    template = storage.template_path(DEFAULT_LIBS)
    storage.delete_template(template)
    flags = (*BrokerSettings().jvm_flags, f"-XX:AOTCacheOutput={draft}")
    with TemporaryDirectory() as folder:
        settings = BrokerSettings(port=0, jvm_flags=flags, start_timeout_s=_S, stop_timeout_s=_S)
        broker = Broker(settings, Path(folder), tethered=True)
        try:
            storage.save_template(broker.format(), template)
            asyncio.run(_serve(broker.start(), Path(folder) / "stack"))
        finally:
            broker.stop()


async def _serve(bootstrap: str, folder: Path) -> None:
    """Run what deployments do most: start, answer requests, and wait for requests."""
    settings = Settings(
        log=LogSettings(bootstrap=bootstrap),
        model=ModelSettings(path="sim"),
        gateway=GatewaySettings(port=0),
        worker=WorkerSettings(engine="sim"),
    )
    async with Stack(settings, StackPlan(broker=False, bridges=1), folder=folder) as stack:
        body = {
            "model": settings.model.served_name,
            "messages": [{"role": "user", "content": "What is a log?"}],
            "max_tokens": _TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        limits = httpx.Limits(max_connections=_STREAMS)
        async with httpx.AsyncClient(timeout=_S, limits=limits) as client:
            url = f"{stack.gateway_urls[0]}/v1/chat/completions"
            answers = await asyncio.gather(*(client.post(url, json=body) for _ in range(_CHATS)))
    for answer in answers:
        answer.raise_for_status()


if __name__ == "__main__":
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # new topics look for their leaders
    make(aot_cache(DEFAULT_LIBS))

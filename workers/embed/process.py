"""Runs one embedding worker: loads its models, which takes seconds, then serves until stopped."""

import asyncio

from schemas.codec import Codec
from schemas.settings import LogSettings, ModelSettings
from workers.embed.embedders.choose import make_embedder
from workers.embed.embedders.served_tokens import ServedTokens
from workers.embed.settings import SERVED, EmbeddingSettings
from workers.embed.worker import EmbeddingWorker


async def run_embedding(
    log_settings: LogSettings,
    settings: EmbeddingSettings,
    model: ModelSettings,
    *,
    engine: str,
    worker_id: str,
    stop: asyncio.Event,
    codec: Codec,
) -> None:
    """Serve until `stop` is set and the work in flight is done; raise the error that ends it else.

    `engine` is the deployment's; with simulated engines the default is the light embedder.
    """
    embedder = await asyncio.to_thread(make_embedder, settings, engine)
    served = None
    if settings.tokenizer == SERVED:
        served = await asyncio.to_thread(ServedTokens, model)
    worker = EmbeddingWorker(
        log_settings,
        settings,
        embedder,
        worker_id,
        codec,
        tokens=served.ids if served else None,
        tokenizer=served.name if served else "",
    )
    await worker.run(stop)

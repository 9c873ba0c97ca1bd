"""Makes the embedder that the settings name.

torch is imported only when a real model is asked for.
"""

import hashlib
from pathlib import Path

from schemas.errors import ConfigError
from schemas.rules.embedders import public_name
from workers.embed.embedders.hashed import HashEmbedder
from workers.embed.embedders.protocol import Embedder
from workers.embed.settings import EmbeddingSettings
from workers.models.wheels import MINILM, WHEELS, wheel_folder, wheel_version

HASH = "hash"
_DIGEST_CHARS = 12


def embedding_model(settings: EmbeddingSettings, engine: str) -> str:
    """Return the model's name; a simulated deployment has the light one by default."""
    return settings.model or (HASH if engine == "sim" else MINILM)


def public_embedder(settings: EmbeddingSettings, engine: str) -> str:
    """Return the name of the first model that calls use, without its version."""
    if settings.name:
        return public_name(settings.name)
    return Path(embedding_model(settings, engine)).expanduser().resolve().name


def make_embedder(settings: EmbeddingSettings, engine: str) -> Embedder:
    """Make the embedder, which takes seconds for a real model; raises ConfigError."""
    model = embedding_model(settings, engine)
    if model == HASH:
        light = HashEmbedder()
        light.name = settings.name or light.name
        return light
    if model in WHEELS:
        folder, name = wheel_folder(model), f"{model}@{wheel_version(model)}"
    else:
        folder = Path(model).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"embedding.model: expected {HASH}, {MINILM} or the folder of a "
                f"sentence-transformers model, found {model!r}"
            )
        name = f"{folder.resolve().name}@{_digest(folder / 'config.json')}"
    from workers.embed.embedders.sentence import SentenceEmbedder

    return SentenceEmbedder(
        folder,
        settings.name or name,
        threads=settings.threads,
        batch_tokens=settings.batch_tokens,
    )


def _digest(file: Path) -> str:
    if not file.exists():
        raise ConfigError(f"embedding.model: expected a model's folder, found no {file}")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGEST_CHARS]

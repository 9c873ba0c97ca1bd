"""The parts of a process that sends calls to routers: those that a gateway and a bridge share."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from schemas.codec import Codec
from schemas.model.files import model_folder
from schemas.model.parsers import parsers_of
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from streams.calls.in_flight import CallsInFlight
from streams.calls.log.answers import ProgressReporter
from streams.calls.log.member import CallMember
from streams.calls.log.pool import LogPool
from streams.calls.log.sender import LogSender
from streams.calls.log.tokens import TokenReader
from streams.calls.metrics import Metrics
from streams.calls.request.served import (
    ModelCard,
    ServedModel,
    ServedModels,
    Tokenizers,
    encoding_of,
)
from streams.calls.stream.hub import Hub
from streams.log.clock import wall_ms


async def load_models(models: Sequence[ModelSettings], tokenizers_max: int) -> ServedModels:
    """Load the tokenizer of the first model, and find out what the others and all adapters are.

    Raises ConfigError.
    """
    return await asyncio.to_thread(_load_models, models, Tokenizers(tokenizers_max))


def _load_models(models: Sequence[ModelSettings], tokenizers: Tokenizers) -> ServedModels:
    created_s = wall_ms() // 1000
    first, *other_cards = [card for model in models for card in _cards(model, created_s)]
    for i, card in enumerate(other_cards):
        other_cards[i] = replace(card, reads_passages=card.encoding == first.encoding)
    return ServedModels(ServedModel(first, tokenizers.load(first)), other_cards, tokenizers)


def _cards(model: ModelSettings, created_s: int) -> list[ModelCard]:
    """Return a model, and the adapters over it."""
    folder = model_folder(model)
    card = ModelCard(
        name=model.served_name,
        model=model.served_name,
        folder=folder.resolve(),
        encoding=encoding_of(folder),
        max_model_len=model.max_model_len,
        created_s=created_s,
        parsers=parsers_of(model),
    )
    adapters = [
        replace(card, name=name, adapter=name, root=Path(path).name)
        for name, path in model.adapters.items()
    ]
    return [card, *adapters]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProcess:
    """The connection to the log, and the calls in flight. Without a `url`, as in a bridge, the
    process serves no callers over HTTP."""

    metrics: Metrics
    sender: LogSender
    tokens: TokenReader
    member: CallMember
    reporter: ProgressReporter
    pool: LogPool
    calls: CallsInFlight

    @classmethod
    def build(
        cls,
        log: LogSettings,
        codec: Codec,
        settings: GatewaySettings,
        models: ServedModels,
        *,
        process_id: str,
        url: str = "",
        embedders: Collection[str] = (),
    ) -> Self:
        """Build the parts; nothing is connected yet. `embedders` are the names of embedding
        models in the settings."""
        started_ms, metrics = wall_ms(), Metrics()
        hub = Hub(metrics)
        accept_ms = settings.accept_ms
        sender = LogSender(log, codec, metrics, client_id=process_id, accept_ms=accept_ms)
        tokens = TokenReader(log, codec, hub, client_id=process_id, bury=sender.bury)
        member = CallMember(
            log,
            codec,
            settings,
            member_id=process_id,
            started_ms=started_ms,
            url=url,
            models=models.models,
            hub=hub,
            sender=sender,
            tokens=tokens,
        )
        metrics.fleet = member.joined_view
        calls = CallsInFlight(
            *(settings, models, hub, metrics),
            fleet=member,
            log=sender,
            process_id=process_id,
            started_ms=started_ms,
        )
        return cls(
            metrics=metrics,
            sender=sender,
            tokens=tokens,
            member=member,
            reporter=ProgressReporter(process_id, hub, producer=sender.started),
            pool=LogPool(log, codec, f"{process_id}-asks", accept_ms, embedders),
            calls=calls,
        )

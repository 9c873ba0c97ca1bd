"""The parts of a process that sends calls to routers: those that a gateway and a bridge share."""

import asyncio
from dataclasses import dataclass
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
from streams.calls.request.intake import ServedModel
from streams.calls.request.tokenizer import Tokenizer
from streams.calls.stream.hub import Hub
from streams.log.clock import wall_ms


async def load_model(model: ModelSettings) -> ServedModel:
    """Load the tokenizer of the served model, and find out its parsers."""
    tokenizer = await asyncio.to_thread(lambda: Tokenizer(model_folder(model)))
    parsers = await asyncio.to_thread(parsers_of, model)
    return ServedModel(
        name=model.served_name,
        tokenizer=tokenizer,
        max_model_len=model.max_model_len,
        created_s=wall_ms() // 1000,
        parsers=parsers,
    )


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
        served: ServedModel,
        *,
        models: frozenset[str],
        process_id: str,
        url: str = "",
    ) -> Self:
        """Build the parts; nothing is connected yet. `models` are all names of the served one."""
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
            models=models,
            hub=hub,
            sender=sender,
            tokens=tokens,
        )
        metrics.fleet = member.joined_view
        calls = CallsInFlight(
            *(settings, served, hub, metrics),
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
            pool=LogPool(log, codec, f"{process_id}-asks", accept_ms),
            calls=calls,
        )

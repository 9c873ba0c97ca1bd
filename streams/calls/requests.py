"""Turns a checked call into requests for the routers, one for each choice, and sends them.

A call is accepted when the broker has acknowledged all of its requests; if something fails before
that, the client has to retry. The options of a call are from its body, its headers or the settings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from schemas.errors import InvalidRequest
from schemas.records import Priority, Request, Retrieval
from schemas.rules import trace
from schemas.rules.tokens import pack_tokens
from streams.calls.config import GatewaySettings
from streams.calls.ids import Conversation, choice_ids
from streams.calls.in_flight import CallsInFlight
from streams.calls.request.body import one_of, priority_of
from streams.calls.request.intake import CallIntake
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.hub import Call
from streams.calls.wishes import ORCHESTRATION_HEADER, POLICY_HEADER, check_wishes
from streams.config import ORCHESTRATIONS, POLICIES

PRIORITY_HEADER, DEADLINE_HEADER = "x-priority", "x-deadline-ms"
WEIGHTS_HEADER, DISCONNECT_HEADER = "x-trivium-weights", "x-trivium-on-disconnect"
EVENT_IDS_HEADER = "x-trivium-event-ids"
_WEIGHTS = ("ttft", "tpot")
RawHeaders = Mapping[bytes, bytes]  # by lower-case name


class Caller(Protocol):
    """The client of a call, as its connection shows it."""

    call_id: str
    tenant: str
    arrived_ms: int
    arrived_s: float

    @property
    def headers(self) -> RawHeaders:
        """Return the headers of the call."""

    def abort_connection(self) -> None:
        """Close the connection at once, and discard unsent data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The options of a call, from its body, its headers or the settings."""

    priority: Priority
    deadline_ms: int
    w_ttft: float  # both are -1 if the call names no weights
    w_tpot: float
    policy: str  # empty if the call wishes none; so is the next
    orchestration: str
    keeps_running: bool  # after the client has disconnected
    event_ids: bool = False  # so that the client can resume the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """A checked call: its body, its options, and its conversation."""

    intake: CallIntake
    options: CallOptions
    conversation: Conversation
    is_message: bool = False  # the answer is in Anthropic's form


async def accept(calls: CallsInFlight, caller: Caller, inquiry: Inquiry) -> Call:
    """Send the call's requests, and wait until the broker has acknowledged them all."""
    intake = inquiry.intake
    card = intake.card
    await calls.admit(caller.tenant, choices := len(intake.prompts) * intake.n, card)
    partition, offset = calls.fleet.reply_position(card.model, card.adapter)
    key = StreamKey(
        parent_id=caller.call_id,
        session_id=inquiry.conversation.session_id,
        model=card.name,
        endpoint=intake.endpoint,
        partition=partition,
        offset=offset,
        created_s=caller.arrived_ms // 1000,
        deadline_ms=inquiry.options.deadline_ms,
        tenant=caller.tenant,
        choices=choices,
        prompts=len(intake.prompts),
        include_usage=intake.include_usage,
        token_ids=intake.token_ids,
        names_ids=bool(intake.body.return_tokens_as_token_ids),
        is_message=inquiry.is_message,
    )
    requests = requests_of(calls, inquiry, key, caller.arrived_ms)
    call = Call(
        key,
        deadline_ms=key.deadline_ms,
        arrived_s=caller.arrived_s,
        waits_for_end=not intake.stream,
        abort_connection=caller.abort_connection,
        tolerates_difference=calls.tolerates_difference,
    )
    call.echoes = intake.echoes
    for request in requests:
        call.add(request.request_id, request.choice)
    calls.hold(call)
    try:
        traces = trace.trace_of([(trace.HEADER, caller.headers.get(trace.HEADER.encode()))])
        await calls.send(requests, traces)
    except BaseException:
        calls.give_up(call)  # some requests may be on the log
        raise
    return call


def requests_of(
    calls: CallsInFlight, inquiry: Inquiry, key: StreamKey, arrived_ms: int
) -> list[Request]:
    """Build the records for routers, one per choice.

    Raises InvalidRequest for a placement that this deployment does not support.
    """
    intake, options, card = inquiry.intake, inquiry.options, inquiry.intake.card
    has_probe = intake.search is not None and intake.search.probe is not None
    if options.policy or options.orchestration or has_probe:
        servers = partial(calls.fleet.servers, card.model)
        check_wishes(servers, intake, options.policy, options.orchestration)
    first = Request(
        request_id=key.parent_id,
        parent_id=key.parent_id,
        session_id=key.session_id,
        turn=inquiry.conversation.turn,
        endpoint=key.endpoint,
        priority=options.priority,
        tenant=key.tenant,
        model=card.model,
        adapter=card.adapter,
        prompt_tokens=pack_tokens(intake.prompts[0]),
        sampling=intake.samplings[0],
        arrived_ms=arrived_ms,
        deadline_ms=key.deadline_ms,
        gateway_id=calls.process_id,
        gateway_partition=key.partition,
        w_ttft=options.w_ttft,
        w_tpot=options.w_tpot,
        policy=options.policy,
        orchestration=options.orchestration,
        gateway_started_ms=calls.started_ms,
        keeps_running=options.keeps_running,
        retrieval=_retrieval(calls, intake, arrived_ms),
        cache_scope=_cache_scope(calls.settings, key.tenant, card.adapter, intake.body.cache_salt),
        parsing=intake.parsing,
    )
    if key.choices == 1:
        return [first]
    requests = []
    for choice, request_id in enumerate(choice_ids(key.parent_id, key.choices)):
        prompt, nth = divmod(choice, intake.n)
        sampling = intake.samplings[prompt]
        requests.append(
            replace(
                first,
                request_id=request_id,
                choice=choice,
                prompt_tokens=pack_tokens(intake.prompts[prompt]),
                sampling=replace(sampling, seed=(sampling.seed or 0) + nth),
            )
        )
    return requests


def _cache_scope(settings: GatewaySettings, tenant: str, adapter: str, salt: str | None) -> str:
    """Return the scope in which prompts may share KV blocks: none share those of an adapter with
    others. Names of tenants have neither slash nor plus; those of adapters may, so their length
    precedes them."""
    scope = "" if settings.shared_cache else tenant
    if adapter:
        scope = f"{scope}+{len(adapter)}:{adapter}"
    return f"{scope}/{salt}" if salt else scope


def _retrieval(calls: CallsInFlight, intake: CallIntake, arrived_ms: int) -> Retrieval | None:
    """Return the search that precedes the answer, or None."""
    if intake.search is None:
        return None
    limit, sampling = intake.card.max_model_len, intake.samplings[0]
    return intake.search.record(calls.settings, sampling, limit, arrived_ms)


def options_of(
    headers: RawHeaders, arrived_ms: int, intake: CallIntake, settings: GatewaySettings
) -> CallOptions:
    """Return the options of a call; raises InvalidRequest."""
    priority = intake.priority or priority_of(
        settings, _text_of(headers, PRIORITY_HEADER), PRIORITY_HEADER
    )
    deadline_ms = deadline_of(headers, arrived_ms, settings)
    w_ttft, w_tpot = _weights(headers)
    keeps_running = _choice(headers, DISCONNECT_HEADER, "cancel", "continue")
    event_ids = _choice(headers, EVENT_IDS_HEADER, "false", "true")
    return CallOptions(
        priority=Priority(priority or settings.priority),
        deadline_ms=deadline_ms,
        w_ttft=w_ttft,
        w_tpot=w_tpot,
        policy=intake.policy or _wish(headers, POLICY_HEADER, POLICIES),
        orchestration=intake.orchestration or _wish(headers, ORCHESTRATION_HEADER, ORCHESTRATIONS),
        keeps_running=bool(keeps_running),
        event_ids=bool(keeps_running) if event_ids is None else event_ids,
    )


def deadline_of(headers: RawHeaders, arrived_ms: int, settings: GatewaySettings) -> int:
    """Return the wall-clock time in ms by which a call has to end; raises InvalidRequest."""
    value = headers.get(DEADLINE_HEADER.encode())
    if value is None:
        return arrived_ms + settings.deadline_ms
    text, maximum = value.strip(), settings.deadline_ms_max
    if not text.isdigit() or len(text) > 15 or not 1 <= int(text) <= maximum:
        raise InvalidRequest(
            f"{DEADLINE_HEADER}: expected a whole number from 1 to {maximum}, "
            f"found {value.decode('latin-1')[:40]!r}",
            DEADLINE_HEADER,
        )
    return arrived_ms + int(text)


def _text_of(headers: RawHeaders, name: str) -> str | None:
    value = headers.get(name.encode())
    return None if value is None else value.decode("latin-1")


def _wish(headers: RawHeaders, header: str, names: Sequence[str]) -> str:
    text = _text_of(headers, header)
    return one_of(names, text and text.strip().lower(), header) or ""


def _choice(headers: RawHeaders, header: str, no: str, yes: str) -> bool | None:
    """Return whether a header is `yes` and not `no`; None without it. Raises InvalidRequest."""
    text = _text_of(headers, header)
    if text is None:
        return None
    if (word := text.strip().lower()) not in (no, yes):
        raise InvalidRequest(f"{header}: expected {no} or {yes}, found {text[:40]!r}", header)
    return word == yes


def _weights(headers: RawHeaders) -> tuple[float, float]:
    """Return the weights of TTFT and TPOT for placement; a weight that the header does not name is
    0.

    Both are -1 without the header. Raises InvalidRequest.
    """
    text = _text_of(headers, WEIGHTS_HEADER)
    if text is None:
        return -1.0, -1.0
    weights: dict[str, float] = {}
    try:
        for part in text.split(","):
            name, _, number = part.partition("=")
            weight = float(number)
            name = name.strip().lower()
            if name not in _WEIGHTS or name in weights or not 0 <= weight < math.inf:
                raise ValueError
            weights[name] = weight
        if not any(weights.values()):
            raise ValueError
    except ValueError:
        raise InvalidRequest(
            f"{WEIGHTS_HEADER}: expected ttft=NUMBER,tpot=NUMBER with numbers of at least 0, one "
            f"of them above 0, found {text[:60]!r}",
            WEIGHTS_HEADER,
        ) from None
    return weights.get("ttft", 0.0), weights.get("tpot", 0.0)

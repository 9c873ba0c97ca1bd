"""Accepting a call: a checked body becomes requests on the log, one per choice.

A call is accepted when the broker has acknowledged all of them; what fails before that is the
client's to retry.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from schemas.errors import InvalidRequest
from schemas.log.clients import Headers
from schemas.records import CancelReason, Priority, Request
from schemas.rules import trace
from schemas.rules.tokens import pack_tokens
from schemas.rules.trace import trace_of
from streams.config import ORCHESTRATIONS, POLICIES
from streams.gateway.http.exchange import RawHeaders, number_header
from streams.gateway.ids import choice_ids
from streams.gateway.request import conversation as sessions
from streams.gateway.request.conversation import Conversation
from streams.gateway.request.intake import Intake, one_of, priority_of
from streams.gateway.state import Gateway
from streams.gateway.stream.event_id import StreamKey
from streams.gateway.stream.hub import Call

PRIORITY_HEADER, DEADLINE_HEADER = b"x-priority", "x-deadline-ms"
WEIGHTS_HEADER, DISCONNECT_HEADER = b"x-trivium-weights", b"x-trivium-on-disconnect"
POLICY_HEADER, ORCHESTRATION_HEADER = "x-trivium-policy", "x-trivium-orchestration"
_WEIGHTS = ("ttft", "tpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, and under which id."""

    parent_id: str
    tenant: str
    headers: RawHeaders
    arrived_ms: int
    arrived_s: float
    cut: Callable[[], None]


def conversation_of(gateway: Gateway, caller: Caller, intake: Intake) -> Conversation:
    """The session of a call, by header or by what was said."""
    named = sessions.from_headers(caller.headers)
    if named is not None:
        turn = sum(message["role"] == "assistant" for message in intake.messages)
        return Conversation(session_id=named, turn=turn)
    scope = f"{caller.tenant}\0{intake.user}"
    return gateway.sessions.find(scope, intake.messages, caller.arrived_ms)


async def accept(
    gateway: Gateway, caller: Caller, intake: Intake, conversation: Conversation
) -> Call:
    """Send the call's requests; returns when the broker has them all."""
    choices = len(intake.prompts) * intake.n
    gateway.admit(choices)
    key = _key(gateway, caller, intake, conversation.session_id, choices)
    requests = _requests(gateway, caller, intake, key, conversation.turn)
    call = Call(
        key,
        deadline_ms=key.deadline_ms,
        arrived_s=caller.arrived_s,
        only_end=not intake.stream,
        cut=caller.cut,
        goes_on=gateway.goes_on,
    )
    for request in requests:
        call.add(request.request_id, request.choice)
    gateway.hold(call)
    try:
        await _send_all(gateway, requests, _trace(caller.headers))
    except BaseException:
        gateway.release(call)
        gateway.cancel_later(call, CancelReason.CLIENT_GONE)  # some may have got through
        raise
    return call


def _key(
    gateway: Gateway, caller: Caller, intake: Intake, session_id: str, choices: int
) -> StreamKey:
    partition, offset = gateway.backend.place()
    return StreamKey(
        parent_id=caller.parent_id,
        session_id=session_id,
        model=gateway.served.name,
        endpoint=intake.endpoint,
        partition=partition,
        offset=offset,
        created_s=caller.arrived_ms // 1000,
        deadline_ms=_deadline_ms(gateway, caller),
        tenant=caller.tenant,
        choices=choices,
        prompts=len(intake.prompts),
        include_usage=intake.include_usage,
        token_ids=intake.token_ids,
    )


def _requests(
    gateway: Gateway, caller: Caller, intake: Intake, key: StreamKey, turn: int
) -> list[Request]:
    w_ttft, w_tpot = _weights(caller.headers.get(WEIGHTS_HEADER))
    first = Request(
        request_id=key.parent_id,
        parent_id=key.parent_id,
        session_id=key.session_id,
        turn=turn,
        endpoint=key.endpoint,
        priority=_priority(gateway, caller, intake),
        tenant=caller.tenant,
        model=key.model,
        prompt_tokens=pack_tokens(intake.prompts[0]),
        sampling=intake.samplings[0],
        arrived_ms=caller.arrived_ms,
        deadline_ms=key.deadline_ms,
        gateway_id=gateway.gateway_id,
        gateway_partition=key.partition,
        w_ttft=w_ttft,
        w_tpot=w_tpot,
        policy=intake.policy or _named(caller, POLICY_HEADER, POLICIES),
        orchestration=intake.orchestration or _named(caller, ORCHESTRATION_HEADER, ORCHESTRATIONS),
        gateway_started_ms=gateway.started_ms,
        keeps_running=keeps_running(caller.headers),
    )
    if key.choices == 1:
        return [first]
    found = []
    for choice, request_id in enumerate(choice_ids(key.parent_id, key.choices)):
        prompt, nth = divmod(choice, intake.n)
        sampling = intake.samplings[prompt]
        found.append(
            replace(
                first,
                request_id=request_id,
                choice=choice,
                prompt_tokens=pack_tokens(intake.prompts[prompt]),
                sampling=replace(sampling, seed=(sampling.seed or 0) + nth),
            )
        )
    return found


def _priority(gateway: Gateway, caller: Caller, intake: Intake) -> Priority:
    header = caller.headers.get(PRIORITY_HEADER)
    value = header and header.decode("latin-1")
    allowed = gateway.settings.priorities
    named = intake.priority or priority_of(allowed, value, PRIORITY_HEADER.decode())
    return Priority(named or gateway.settings.priority)


def _named(caller: Caller, header: str, names: Sequence[str]) -> str:
    """A wish in a header; empty where there is none. Raises InvalidRequest for unknown names."""
    value = caller.headers.get(header.encode())
    return one_of(names, value and value.decode("latin-1").strip().lower(), header) or ""


def _deadline_ms(gateway: Gateway, caller: Caller) -> int:
    most = gateway.settings.deadline_ms_max
    relative = number_header(caller.headers, DEADLINE_HEADER, 1, most)
    return caller.arrived_ms + (relative or gateway.settings.deadline_ms)


def keeps_running(headers: RawHeaders) -> bool:
    """Whether the work is to go on when the client hangs up. Raises InvalidRequest."""
    value = headers.get(DISCONNECT_HEADER, b"cancel").decode("latin-1").strip().lower()
    if value not in ("cancel", "continue"):
        raise InvalidRequest(
            f"x-trivium-on-disconnect: expected cancel or continue, found {value[:40]!r}",
            "x-trivium-on-disconnect",
        )
    return value == "continue"


def _weights(value: bytes | None) -> tuple[float, float]:
    """Weights of TTFT and TPOT for placement; what the header does not name weighs 0, and -1
    stands for a call without the header. Raises InvalidRequest.
    """
    if value is None:
        return -1.0, -1.0
    found: dict[str, float] = {}
    try:
        for part in value.decode("latin-1").split(","):
            name, _, number = part.partition("=")
            weight = float(number)
            name = name.strip().lower()
            if name not in _WEIGHTS or name in found or not 0 <= weight < math.inf:
                raise ValueError
            found[name] = weight
        if not any(found.values()):
            raise ValueError
    except ValueError:
        raise InvalidRequest(
            "x-trivium-weights: expected ttft=NUMBER,tpot=NUMBER with numbers of at least 0, one "
            f"of them above 0, found {value.decode('latin-1')[:60]!r}",
            "x-trivium-weights",
        ) from None
    return found.get("ttft", 0.0), found.get("tpot", 0.0)


def _trace(headers: RawHeaders) -> Headers:
    return trace_of([(trace.HEADER, headers.get(trace.HEADER.encode()))])


async def _send_all(gateway: Gateway, requests: list[Request], headers: Headers) -> None:
    if len(requests) == 1:
        await gateway.backend.send(requests[0], headers)
        return
    await asyncio.gather(*(gateway.backend.send(request, headers) for request in requests))

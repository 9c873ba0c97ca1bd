"""The options of a call, from its body or its headers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import InvalidRequest
from schemas.records import Priority
from streams.calls.config import GatewaySettings
from streams.calls.request.body import one_of, priority_of
from streams.calls.request.intake import CallIntake
from streams.config import ORCHESTRATIONS, POLICIES

PRIORITY_HEADER, DEADLINE_HEADER = "x-priority", "x-deadline-ms"
WEIGHTS_HEADER, DISCONNECT_HEADER = "x-trivium-weights", "x-trivium-on-disconnect"
EVENT_IDS_HEADER = "x-trivium-event-ids"
POLICY_HEADER, ORCHESTRATION_HEADER = "x-trivium-policy", "x-trivium-orchestration"
_WEIGHTS = ("ttft", "tpot")
RawHeaders = Mapping[bytes, bytes]  # by lower-case name


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

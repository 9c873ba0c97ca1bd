"""Parses faults of a command line: `decode-1@12.5s`, or `decode-1@12.5s+4s` with a duration.

Called by `trivium replay`.
"""

import re
from collections.abc import Sequence
from typing import Any

from infra.simulator.cluster import READY_MS, Cluster, SimFault
from infra.simulator.faults import losses, members
from schemas.errors import ConfigError

ROUTER, BROKER = "router", "broker"
KINDS = ("kill", "stop", "slow", "drain")
SLOW_TIMES = 10.0
TAKE_OVER_MS, OUTAGE_MS, STOP_MS, DRAIN_MS = 3_000.0, 3_000.0, 5_000.0, 2_000.0
_TIME = r"(\d+(?:\.\d+)?)(ms|s|m|h)"
_UNITS_MS = {"ms": 1.0, "s": 1e3, "m": 60e3, "h": 3_600e3}


def faults_of(kind: str, text: str, workers: Sequence[str]) -> list[SimFault]:
    """Return the faults of one of `KINDS` that the text describes.

    Its time counts from the first request. Raises ConfigError.
    """
    matched_text = re.fullmatch(rf"(?P<name>[^@]+)@{_TIME}(?:\+{_TIME})?", text.strip())
    if matched_text is None:
        raise ConfigError(f"--{kind}: expected NAME@TIME or NAME@TIME+DURATION, such as "
                          f"decode-1@12.5s+4s, found {text!r}")  # fmt: skip
    name, at, at_unit, lasts, lasts_unit = matched_text.groups()
    at_ms = READY_MS + float(at) * _UNITS_MS[at_unit]
    for_ms = float(lasts) * _UNITS_MS[lasts_unit] if lasts else None
    member_names = [*workers, *_MEMBERS.get(kind, ())]
    if name not in member_names:
        raise ConfigError(f"--{kind}: expected any of {', '.join(member_names)}, found {name!r}")
    if name in (ROUTER, BROKER):
        return [_of_member(kind, name, at_ms, for_ms)]
    return _of_worker(kind, name, at_ms, for_ms)


_MEMBERS = {"kill": (ROUTER, BROKER), "stop": (ROUTER,)}


def _of_member(kind: str, name: str, at_ms: float, for_ms: float | None) -> SimFault:
    if name == BROKER:
        return SimFault(at_ms, members.lose_broker, for_ms or OUTAGE_MS)
    if kind == "stop":
        return SimFault(at_ms, members.pause_router, for_ms or STOP_MS)
    return SimFault(at_ms, losses.lose_router, 0, for_ms or TAKE_OVER_MS)


def _of_worker(kind: str, name: str, at_ms: float, for_ms: float | None) -> list[SimFault]:
    back: tuple[Any, ...]  # a fault's function and arguments
    match kind:
        case "kill":
            fault, back = SimFault(at_ms, losses.crash, name), (losses.restart, name)
        case "stop":
            return [SimFault(at_ms, _pause, name, for_ms or STOP_MS)]
        case "slow":
            fault = SimFault(at_ms, losses.slow_prefill, name, SLOW_TIMES)
            back = (losses.slow_prefill, name, 1.0)
        case _:
            return [SimFault(at_ms, losses.drain, name, for_ms or DRAIN_MS)]
    return [fault] if for_ms is None else [fault, SimFault(at_ms + for_ms, *back)]


def _pause(cluster: Cluster, name: str, for_ms: float) -> None:
    members.pause_worker(cluster, cluster.workers[name], for_ms)

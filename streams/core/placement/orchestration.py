"""Chooses the orchestration of a remote placement, among those that both workers support.

Called by `streams/core/placement/placer.py` for every remote placement.
"""

from typing import TYPE_CHECKING, NamedTuple

from schemas.records import Capability, Orchestration, Unmet
from streams.config import RouterSettings

if TYPE_CHECKING:  # gateways call `common_orders` and should not import the fleet
    from streams.core.fleet.workers import Worker

_ORDER = (Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)
_PREFILL_FIRST = Orchestration.PREFILL_FIRST


class OrchestrationChoice(NamedTuple):
    """The orchestration, and why the wish was not met, if so."""

    orchestration: Orchestration
    unmet: Unmet = Unmet.NONE


def choose(
    settings: RouterSettings,
    wish: str,
    max_tokens: int,
    prefill: "Worker",
    decode: "Worker | None",
    decode_ahead_tokens: int,
) -> OrchestrationChoice:
    """Return the wished orchestration, or the next one that both workers support.

    The decode worker has `decode_ahead_tokens` more of the prompt cached than the prefill worker.
    All orchestrations but prefill_first need both workers at once. So prefill_first is used if no
    decode worker has credit, if the answer ends in prefill, and if one worker has both roles.
    """
    orchestration, why = _PREFILL_FIRST, _hindrance(max_tokens, prefill, decode)
    if why is None and decode is not None:
        reuses = decode_ahead_tokens >= settings.reuse_tokens_min
        first = ("decode_first" if reuses else "concurrent") if wish == "auto" else wish
        orchestration, why = _first(first, prefill, decode), Unmet.ENGINES_CANNOT
    return OrchestrationChoice(
        orchestration, Unmet.NONE if wish in ("auto", orchestration) or why is None else why
    )


def _hindrance(max_tokens: int, prefill: "Worker", decode: "Worker | None") -> Unmet | None:
    if decode is None:
        return Unmet.NO_DECODE_ROOM
    if max_tokens == 1:
        return Unmet.ONE_TOKEN
    return Unmet.ONE_WORKER if prefill.worker_id == decode.worker_id else None


def _first(wish: str, prefill: "Worker", decode: "Worker") -> Orchestration:
    """Return the wished orchestration, or the next one that both support."""
    if wish == _PREFILL_FIRST:
        return _PREFILL_FIRST
    if not decode.keeps_time_with(prefill.member):  # allocated KV blocks expire by both clocks
        return _PREFILL_FIRST
    common = common_orders(prefill.capability, decode.capability)
    for orchestration in _ORDER[_ORDER.index(Orchestration(wish)) :]:
        if orchestration in common:
            return orchestration
    return _PREFILL_FIRST


def common_orders(prefill: Capability | None, decode: Capability | None) -> set[Orchestration]:
    """Return the orchestrations that both list, if their KV is compatible; only the sim engine
    transposes between degrees of tensor parallelism."""
    if prefill is None or decode is None:
        return set()
    for name in ("model", "engine", "block_size", "kv_layout"):
        if getattr(prefill, name) != getattr(decode, name):
            return set()
    if prefill.tensor_parallel != decode.tensor_parallel and prefill.engine != "sim":
        return set()
    return set(prefill.orchestrations) & set(decode.orchestrations)

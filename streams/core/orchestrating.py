"""How a remote placement runs: the orchestration, among those that both workers can do.

Called by `streams/core/placement.py` for every remote placement.
"""

from schemas.records import Capability, Orchestration
from streams.config import RouterSettings
from streams.core.pool import Worker

_ORDER = (Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)


def choose(
    settings: RouterSettings,
    max_tokens: int,
    prefill: Worker,
    decode: Worker | None,
    decode_ahead_tokens: int,
) -> Orchestration:
    """The wanted orchestration, or the next one that both ends can do.

    `decode_ahead_tokens` is how much more of the prompt the decode worker holds. Both workers are
    bound at once except in prefill_first, which therefore serves where no decode worker has credit,
    where the answer ends in prefill, and where one worker is to do both.
    """
    if decode is None or max_tokens == 1 or prefill.worker_id == decode.worker_id:
        return Orchestration.PREFILL_FIRST
    common = _common(prefill.capability, decode.capability)
    wanted = settings.orchestration
    if wanted == "auto":
        reuses = decode_ahead_tokens >= settings.reuse_tokens_min
        wanted = "decode_first" if reuses else "concurrent"
    if wanted == "prefill_first":
        return Orchestration.PREFILL_FIRST
    for orchestration in _ORDER[_ORDER.index(Orchestration(wanted)) :]:
        if orchestration in common:
            return orchestration
    return Orchestration.PREFILL_FIRST


def _common(prefill: Capability | None, decode: Capability | None) -> set[Orchestration]:
    """What both ends list, where their KV fits; only the sim engine transposes between degrees
    of tensor parallelism."""
    if prefill is None or decode is None:
        return set()
    for name in ("model", "engine", "block_size", "kv_layout"):
        if getattr(prefill, name) != getattr(decode, name):
            return set()
    if prefill.tensor_parallel != decode.tensor_parallel and prefill.engine != "sim":
        return set()
    return set(prefill.orchestrations) & set(decode.orchestrations)

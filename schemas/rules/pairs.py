"""Decides which orchestrations run prefill and decode of a request at the same time, and which two
workers can run together.

The two workers are a pair: prefill writes the KV into decode's blocks, while both have the attempt.
"""

from schemas.records import Capability, Orchestration

_PAIRED = (Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)


def is_paired(orchestration: Orchestration) -> bool:
    """Return whether both workers have the attempt at the same time."""
    return orchestration in _PAIRED


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

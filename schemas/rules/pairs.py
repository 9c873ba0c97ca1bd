"""Decides which orchestrations run prefill and decode of a request at the same time.

The two workers are a pair: prefill writes the KV into decode's blocks, while both have the attempt.
"""

from schemas.records import Orchestration

_PAIRED = (Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)


def is_paired(orchestration: Orchestration) -> bool:
    """Return whether both workers have the attempt at the same time."""
    return orchestration in _PAIRED

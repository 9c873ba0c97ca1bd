"""Which orchestrations run prefill and decode of a request at the same time.

The two are a pair: prefill writes the KV into decode's blocks, while both hold the attempt.
"""

from schemas.records import Orchestration

_PAIRED = (Orchestration.DECODE_FIRST, Orchestration.CONCURRENT)


def is_paired(orchestration: Orchestration) -> bool:
    """Whether both workers hold the attempt at once."""
    return orchestration in _PAIRED

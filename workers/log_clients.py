"""The log as a worker uses it. `workers/runtime.py` makes one bundle for all lives of a process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schemas.codec import Codec
from schemas.log.clients import AssignedReader, LogProducer
from schemas.log.membership import Membership, OnRecord
from schemas.records import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class LogClients:
    """The log as a worker uses it; tests pass their own. Each life starts and stops producers."""

    codec: Codec
    durable: LogProducer
    tokens: LogProducer
    membership: Callable[[OnRecord, Sequence[Role], int], Membership]  # roles, former epoch
    reader: Callable[[str, int], AssignedReader]  # of a topic and partition

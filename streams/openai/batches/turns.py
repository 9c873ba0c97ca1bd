"""Decides which tenants' batches run, and how many lines without an answer each may have. Pure.

A free slot goes to the tenant with the fewest slots; of equal ones, to the tenant that has had none
for the longest. A tenant without a slot gets one soon: a batch of the tenant with the most slots
leaves its slot, or the batch that has had its turn the longest. A batch without a slot sends no
more lines until it gets one again; it still waits for the answers to lines that it has sent.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from schemas.records import Batch

CARRIED_MAX = 16  # batches with a slot
# Lines without an answer, of all batches if one tenant has them all. Bridges read so far ahead that
# no tenant's lines wait behind those of others.
WAITING_MAX, WAITING_BYTES = 4_000, 32 << 20
TURN_LINES = 1_000  # lines that a batch sends before it leaves its slot to another tenant's


@dataclass(frozen=True, slots=True)
class BatchSlot:
    """A batch with a slot, and the number of lines that it has sent since it got it."""

    key: str
    tenant: str
    sent_lines: int


def choose_batches(
    waiting: Mapping[str, Iterator[Batch]],
    slots: Iterable[BatchSlot],
    leave_order: Mapping[str, int],
) -> list[Batch]:
    """Return the batches that get the free slots: the first ones of each tenant in `waiting`.

    `leave_order` has a number by tenant, which rises each time one of its batches leaves its slot.
    """
    slot_counts = Counter(slot.tenant for slot in slots)
    tenants, batches = list(waiting), list[Batch]()
    while tenants and slot_counts.total() < CARRIED_MAX:
        tenant = min(tenants, key=lambda name: (slot_counts[name], leave_order.get(name, 0)))
        if (batch := next(waiting[tenant], None)) is None:
            tenants.remove(tenant)
            continue
        batches.append(batch)
        slot_counts[tenant] += 1
    return batches


def choose_leaver(tenants: Iterable[str], slots: Sequence[BatchSlot]) -> str | None:
    """Return the key of a batch that leaves its slot to a tenant without one, or None.

    `slots` begin with the batch that has had its turn the longest.
    """
    slot_counts = Counter(slot.tenant for slot in slots)
    if slot_counts.total() < CARRIED_MAX or all(tenant in slot_counts for tenant in tenants):
        return None
    highest = max(slot_counts.values())
    for slot in slots:
        if slot_counts[slot.tenant] == highest and (highest > 1 or slot.sent_lines >= TURN_LINES):
            return slot.key
    return None


def may_send(new_lines: int, ahead: int, ahead_bytes: float, tenants: int) -> bool:
    """Return whether a tenant may send `new_lines` more lines, if `ahead` lines have no answer yet.

    The limits are divided by the number of tenants. A tenant with no line ahead may always send.
    """
    share = max(1, tenants)
    fits = ahead + new_lines <= WAITING_MAX // share and ahead_bytes <= WAITING_BYTES // share
    return fits or not ahead

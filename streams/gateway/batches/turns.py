"""Whose batches are carried, and how many lines of whose are ahead of their answers. Pure.

Places go to the tenant that has the fewest, of these to who has been without the longest, and a
tenant without one gets one soon: a batch of whoever has the most leaves its place, or the one that
has had its turn the longest. What has left sends no more lines until it has a place again; what it
has sent is waited for.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from schemas.records import Batch

CARRIED_MAX = 16  # batches that have a place
# Lines of all batches that are asked and not answered, if they are one tenant's. Bridges read so
# far ahead that nobody's lines wait behind those of others.
WAITING_MAX, WAITING_BYTES = 4_000, 32 << 20
TURN_LINES = 1_000  # that a batch has sent before it leaves for another tenant's


@dataclass(frozen=True, slots=True)
class BatchSlot:
    """A batch that has a place, and how many lines it has sent since."""

    key: str
    tenant: str
    sent_lines: int


def choose_batches(
    waiting: Mapping[str, Iterator[Batch]],
    slots: Iterable[BatchSlot],
    leave_order: Mapping[str, int],
) -> list[Batch]:
    """Which get the places that are free: of those `waiting` by tenant, the first. `left` has
    numbers that rise with each batch of a tenant's that leaves its place.
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
    """The key of a batch whose place another one of the tenants is to have; `placed` begin with the
    oldest.
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
    """Whether a tenant may have so many more lines ahead of their answers, where so many tenants
    have some. A first few it always may.
    """
    share = max(1, tenants)
    fits = ahead + new_lines <= WAITING_MAX // share and ahead_bytes <= WAITING_BYTES // share
    return fits or not ahead

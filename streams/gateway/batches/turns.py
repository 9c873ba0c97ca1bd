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
class Placed:
    """A batch that has a place, and how many lines it has sent since."""

    key: str
    tenant: str
    sent: int


def to_begin(
    waiting: Mapping[str, Iterator[Batch]], placed: Iterable[Placed], left: Mapping[str, int]
) -> list[Batch]:
    """Which get the places that are free: of those `waiting` by tenant, the first. `left` has
    numbers that rise with each batch of a tenant's that leaves its place.
    """
    places = Counter(each.tenant for each in placed)
    tenants, found = list(waiting), list[Batch]()
    while tenants and places.total() < CARRIED_MAX:
        tenant = min(tenants, key=lambda each: (places[each], left.get(each, 0)))
        if (batch := next(waiting[tenant], None)) is None:
            tenants.remove(tenant)
            continue
        found.append(batch)
        places[tenant] += 1
    return found


def to_leave(tenants: Iterable[str], placed: Sequence[Placed]) -> str | None:
    """The key of a batch whose place another one of the tenants is to have; `placed` begin with the
    oldest.
    """
    places = Counter(each.tenant for each in placed)
    if places.total() < CARRIED_MAX or all(tenant in places for tenant in tenants):
        return None
    most = max(places.values())
    for each in placed:
        if places[each.tenant] == most and (most > 1 or each.sent >= TURN_LINES):
            return each.key
    return None


def may_send(more: int, ahead: int, ahead_bytes: float, tenants: int) -> bool:
    """Whether a tenant may have so many more lines ahead of their answers, where so many tenants
    have some. A first few it always may.
    """
    share = max(1, tenants)
    fits = ahead + more <= WAITING_MAX // share and ahead_bytes <= WAITING_BYTES // share
    return fits or not ahead

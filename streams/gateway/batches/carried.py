"""Which batches are carried: those that have a place, and those that had one and wait for answers.

Pure. What the table has is looked at anew each time; a look costs as much as is carried, and as
there are tenants, however many batches wait.
"""

from collections.abc import Iterator

from schemas.records import Batch, BatchProgress
from streams.gateway.batches import turns
from streams.gateway.batches.underway import Underway
from streams.gateway.objects.batches import VALIDATING, BatchTable
from streams.gateway.objects.table import key_of


class Carried:
    """By key."""

    def __init__(self) -> None:
        self._placed: dict[str, Underway] = {}  # the one whose step was last is the last
        self._leaving: dict[str, Underway] = {}
        self._left: dict[str, int] = {}  # by tenant: a number that rises when one leaves its place

    def __iter__(self) -> Iterator[Underway]:
        return iter([*self._placed.values(), *self._leaving.values()])

    def get(self, key: str) -> Underway | None:
        """One that is carried."""
        return self._placed.get(key) or self._leaving.get(key)

    def clear(self) -> None:
        """Nothing is; who has had a place last is still known."""
        self._placed.clear()
        self._leaving.clear()

    def tenants(self) -> list[str]:
        """Whose they are."""
        return list({each.batch.tenant: None for each in self})

    def of(self, tenant: str) -> list[Underway]:
        """A tenant's, in the order in which they have their turn."""
        return [each for each in self if each.batch.tenant == tenant]

    def has_had_turn(self, each: Underway) -> None:
        """Others of its tenant are next."""
        key = key_of(each.batch)
        if key in self._placed:
            self._placed[key] = self._placed.pop(key)

    def put(self, each: Underway) -> None:
        """In the stead of what was known of one."""
        key = key_of(each.batch)
        (self._placed if key in self._placed else self._leaving)[key] = each

    def remember(self, batch: Batch, progress: BatchProgress, now_s: float) -> None:
        """One that is begun: whoever carried it, answers to lines of it may come."""
        each = Underway(batch, progress, now_s)
        if self.get(key_of(batch)) is None and each.waiting:
            self._leaving[key_of(batch)] = each

    def look(self, table: BatchTable, now_s: float) -> bool:
        """See what the table has, and give places; whether anything is to be done."""
        for carried in (self._placed, self._leaving):
            for key, each in list(carried.items()):
                name = each.batch.tenant, each.batch.batch_id
                if (batch := table.get(*name)) is not None and table.is_unended(*name):
                    each.batch = batch
                else:
                    self._pop(key, carried)
        for key, each in list(self._leaving.items()):
            is_settled = not each.waiting and not each.pending_bytes
            # What was committed last may not be in the table yet, from which it would go on.
            is_new = each.committed.status == VALIDATING
            if is_settled and (is_new or table.progress(each.batch) == each.committed):
                del self._leaving[key]
        tenants = sorted(table.unended_tenants())
        if (key_to_leave := turns.to_leave(tenants, self._places())) is not None:
            self._leaving[key_to_leave] = self._pop(key_to_leave, self._placed)
        waiting = {
            tenant: (each for each in table.unended(tenant) if key_of(each) not in self._placed)
            for tenant in tenants
        }
        for batch in turns.to_begin(waiting, self._places(), self._left):
            if (key := key_of(batch)) in self._leaving:
                each = self._leaving.pop(key)
            else:
                each = Underway(batch, table.progress(batch) or _unchecked(batch), now_s)
            each.placed_at = each.committed.sent
            self._placed[key] = each
        return bool(tenants)

    def _pop(self, key: str, carried: dict[str, Underway]) -> Underway:
        each = carried.pop(key)
        if carried is self._placed:
            self._left[each.batch.tenant] = 1 + max(self._left.values(), default=0)
        return each

    def _places(self) -> list[turns.Placed]:
        return [
            turns.Placed(key, each.batch.tenant, each.committed.sent - each.placed_at)
            for key, each in self._placed.items()
        ]

    def may_send(self, each: Underway, more: int) -> bool:
        """Whether one has lines left and a place, and its tenant has not too many ahead."""
        if each.committed.sent >= each.committed.total or key_of(each.batch) not in self._placed:
            return False
        own = self.of(each.batch.tenant)
        ahead, ahead_bytes = sum(one.waiting for one in own), sum(one.waiting_bytes for one in own)
        return turns.may_send(more, ahead, ahead_bytes, len(self.tenants()))


def _unchecked(batch: Batch) -> BatchProgress:
    return BatchProgress(
        batch_id=batch.batch_id, tenant=batch.tenant, status=VALIDATING, at_ms=batch.created_ms
    )

"""The batches that run: those with a slot, and those that had one and wait for answers. Pure.

The table is read again each time. That costs time by running batches and tenants, however many
batches wait.
"""

from collections.abc import Iterator

from schemas.records import Batch, BatchProgress
from streams.openai.batches import turns
from streams.openai.batches.batch_run import BatchRun
from streams.openai.objects.batches import VALIDATING, BatchTable
from streams.openai.objects.table import key_of


class BatchRuns:
    """The batches that run, and those that wait for their last answers."""

    def __init__(self) -> None:
        self._running: dict[str, BatchRun] = {}  # by key, the least recently stepped first
        self._leaving: dict[str, BatchRun] = {}
        self._leave_order: dict[
            str, int
        ] = {}  # by tenant: a number that rises when a batch leaves its slot

    def __iter__(self) -> Iterator[BatchRun]:
        return iter([*self._running.values(), *self._leaving.values()])

    def get(self, key: str) -> BatchRun | None:
        """Return the run of a batch by its key."""
        return self._running.get(key) or self._leaving.get(key)

    def clear(self) -> None:
        """Drop all runs, but keep the order in which tenants left their slots."""
        self._running.clear()
        self._leaving.clear()

    def tenants(self) -> list[str]:
        """List the tenants that have runs."""
        return list({run.batch.tenant: None for run in self})

    def of_tenant(self, tenant: str) -> list[BatchRun]:
        """Return the runs of a tenant in the order of their turns."""
        return [run for run in self if run.batch.tenant == tenant]

    def move_to_back(self, run: BatchRun) -> None:
        """Let the other runs of the tenant go first."""
        key = key_of(run.batch)
        if key in self._running:
            self._running[key] = self._running.pop(key)

    def put(self, run: BatchRun) -> None:
        """Replace the run of the same batch."""
        key = key_of(run.batch)
        (self._running if key in self._running else self._leaving)[key] = run

    def remember(self, batch: Batch, progress: BatchProgress, now_s: float) -> None:
        """Keep a run that only waits for answers, whichever gateway started it."""
        run = BatchRun(batch, progress, now_s)
        if self.get(key_of(batch)) is None and run.waiting:
            self._leaving[key_of(batch)] = run

    def refresh(self, table: BatchTable, now_s: float) -> bool:
        """Read the table and assign slots; return whether any batch is open."""
        for group in (self._running, self._leaving):
            for key, run in list(group.items()):
                name = run.batch.tenant, run.batch.batch_id
                if (batch := table.get(*name)) is not None and table.is_open(*name):
                    run.batch = batch
                else:
                    self._pop(key, group)
        for key, run in list(self._leaving.items()):
            is_settled = not run.waiting and not run.pending_bytes
            # The table may lack the last commit, from which the run would continue.
            is_new = run.committed.status == VALIDATING
            if is_settled and (is_new or table.progress(run.batch) == run.committed):
                del self._leaving[key]
        tenants = sorted(table.open_tenants())
        if (key_to_leave := turns.choose_leaver(tenants, self._slots())) is not None:
            self._leaving[key_to_leave] = self._pop(key_to_leave, self._running)
        waiting = {
            tenant: (
                batch for batch in table.open_batches(tenant) if key_of(batch) not in self._running
            )
            for tenant in tenants
        }
        for batch in turns.choose_batches(waiting, self._slots(), self._leave_order):
            if (key := key_of(batch)) in self._leaving:
                run = self._leaving.pop(key)
            else:
                run = BatchRun(batch, table.progress(batch) or _initial_progress(batch), now_s)
            run.sent_before_slot = run.committed.sent_lines
            self._running[key] = run
        return bool(tenants)

    def _pop(self, key: str, group: dict[str, BatchRun]) -> BatchRun:
        run = group.pop(key)
        if group is self._running:
            self._leave_order[run.batch.tenant] = 1 + max(self._leave_order.values(), default=0)
        return run

    def _slots(self) -> list[turns.BatchSlot]:
        return [
            turns.BatchSlot(key, run.batch.tenant, run.committed.sent_lines - run.sent_before_slot)
            for key, run in self._running.items()
        ]

    def may_send(self, run: BatchRun, new_lines: int) -> bool:
        """Return whether a run has a slot and lines left, and its tenant may send more lines."""
        if (
            run.committed.sent_lines >= run.committed.total
            or key_of(run.batch) not in self._running
        ):
            return False
        tenant_runs = self.of_tenant(run.batch.tenant)
        ahead, ahead_bytes = (
            sum(tenant_run.waiting for tenant_run in tenant_runs),
            sum(tenant_run.waiting_bytes for tenant_run in tenant_runs),
        )
        return turns.may_send(new_lines, ahead, ahead_bytes, len(self.tenants()))


def _initial_progress(batch: Batch) -> BatchProgress:
    return BatchProgress(
        batch_id=batch.batch_id, tenant=batch.tenant, status=VALIDATING, at_ms=batch.created_ms
    )

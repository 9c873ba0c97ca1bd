"""Who decodes when nobody does any more, and until when."""

from collections.abc import Sequence

import pytest

from schemas.fleet import LEASE_MS
from schemas.records import AssignRoles, MemberKind, Orchestration, Role
from streams.core.fleet.role_lending import RoleLending
from streams.core.fleet.workers import Fleet
from tests.streams import builders
from tests.streams.builders import ROUTER, T0

AFTER_MS = 5_000
BOTH = (Role.PREFILL, Role.DECODE)


class Play:
    """A fleet whose members beat twice a second; what is ordered, is followed at once."""

    def __init__(self, *, after_ms: int = AFTER_MS, router: str = ROUTER) -> None:
        self.fleet = Fleet(router)
        self.lending = RoleLending(self.fleet, after_ms)
        self.now_ms, self._seq = T0, 0
        self.epochs: dict[str, int] = {}
        self.silent: set[str] = set()
        self.models: dict[str, str] = {}
        self.orders: list[AssignRoles] = []
        for name in (ROUTER, "z-router"):
            self._apply(builders.registration(name, kind=MemberKind.ROUTER))
            self.epochs[name] = 1

    def worker(
        self,
        name: str,
        *roles: Role,
        can: Sequence[Orchestration] = tuple(Orchestration),
        model: str = "",
    ) -> None:
        """It comes, comes again, or has other roles."""
        model = self.models.setdefault(name, model or "tiny")
        epoch = self.epochs.get(name, 0) + 1 if name in self.silent else self.epochs.get(name, 1)
        self.epochs[name] = epoch
        self.silent.discard(name)
        capability = builders.capability(name, *can, model=model)
        self._apply(builders.registration(name, *roles, epoch=epoch, capability=capability))

    def pass_ms(self, passed_ms: int, *, followed: bool = True) -> list[AssignRoles]:
        """What is ordered meanwhile."""
        orders: list[AssignRoles] = []
        for _ in range(0, passed_ms, 500):
            self.now_ms, self._seq = self.now_ms + 500, self._seq + 1
            for name, epoch in self.epochs.items():
                if name not in self.silent:
                    self._apply(builders.beat(name, self._seq, epoch=epoch))
            for lend in self.lending.check(self.now_ms):
                orders.append(lend.record)
                if followed:
                    self.worker(lend.record.worker_id, *lend.record.roles)
        return orders

    def _apply(self, record: object) -> None:
        self.fleet.apply(record, 0, self.now_ms)  # type: ignore[arg-type]  # of the fleet


def pools(**options: object) -> Play:
    """Two prefill workers and a decode worker."""
    on = Play(**options)  # type: ignore[arg-type]  # its own
    on.worker("p0", Role.PREFILL)
    on.worker("p1", Role.PREFILL)
    on.worker("d0", Role.DECODE)
    assert on.pass_ms(2 * AFTER_MS) == []
    return on


def roles_of(orders: Sequence[AssignRoles]) -> list[tuple[str, tuple[Role, ...]]]:
    return [(order.worker_id, tuple(order.roles)) for order in orders]


def test_lending_gives_decode_role_while_no_decode_worker_lives() -> None:
    """The role ends when another decode worker has stayed for a while."""
    on = pools()
    on.silent.add("d0")
    assert on.pass_ms(AFTER_MS) == [], "it may come back"
    assert roles_of(on.pass_ms(LEASE_MS + 1_000)) == [("p0", BOTH)]
    assert on.pass_ms(3 * AFTER_MS) == []
    on.worker("d0", Role.DECODE)
    assert on.pass_ms(AFTER_MS - 1_000) == [], "it may go again"
    assert roles_of(on.pass_ms(2_000)) == [("p0", (Role.PREFILL,))]
    assert on.pass_ms(3 * AFTER_MS) == []


def test_lending_takes_worker_of_the_model_that_needs_it() -> None:
    on = pools()
    on.worker("a0", Role.PREFILL, model="other")
    on.worker("b0", Role.DECODE, model="other")
    on.pass_ms(AFTER_MS)
    on.silent.add("d0")
    assert roles_of(on.pass_ms(AFTER_MS + LEASE_MS + 1_000)) == [("p0", BOTH)]
    on.silent.add("b0")
    assert roles_of(on.pass_ms(AFTER_MS + LEASE_MS + 1_000)) == [("a0", BOTH)]
    on.worker("b0", Role.DECODE)
    assert roles_of(on.pass_ms(2 * AFTER_MS)) == [("a0", (Role.PREFILL,))]


def test_lending_asks_each_worker_once() -> None:
    """A worker may be unable to follow, for example when no partition is free."""
    on = pools()
    on.silent.add("d0")
    orders = on.pass_ms(6 * AFTER_MS, followed=False)
    assert roles_of(orders) == [("p0", BOTH), ("p1", BOTH)]


def test_lending_replaces_lost_borrower_which_returns_without_role() -> None:
    on = pools()
    on.silent.add("d0")
    on.pass_ms(AFTER_MS + LEASE_MS + 1_000)
    on.silent.add("p0")
    assert roles_of(on.pass_ms(AFTER_MS + LEASE_MS + 1_000)) == [("p1", BOTH)]
    on.worker("p0", Role.PREFILL)
    on.worker("d0", Role.DECODE)
    assert roles_of(on.pass_ms(2 * AFTER_MS)) == [("p1", (Role.PREFILL,))]


@pytest.mark.parametrize("case", ["never", "other router", "moved away", "cannot", "replica lives"])
def test_lending_orders_nothing_where_lending_does_not_apply(case: str) -> None:
    on = pools(
        after_ms=0 if case == "never" else AFTER_MS,
        router="z-router" if case == "other router" else ROUTER,
    )
    if case == "cannot":
        for name in ("p0", "p1"):
            on.worker(name, Role.PREFILL, can=())
    elif case == "replica lives":
        on.worker("r0", Role.REPLICA)
    if case == "moved away":
        on.worker("d0", Role.PREFILL)
    else:
        on.silent.add("d0")
    assert on.pass_ms(4 * AFTER_MS) == []

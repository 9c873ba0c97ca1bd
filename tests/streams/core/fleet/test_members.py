"""Counts of workers: they are of one life in one role, and who takes nothing new keeps them."""

from schemas.records import Role
from streams.core.fleet.workers import Fleet, Worker
from tests.streams import builders
from tests.streams.builders import ROUTER, T0


def joined(*roles: Role, epoch: int = 1) -> tuple[Fleet, Worker]:
    """A fleet of one worker with two credits in each role, and the worker in the last one."""
    fleet = Fleet(ROUTER)
    fleet.apply(builders.registration("w", *roles, epoch=epoch), 0, T0)
    fleet.apply(builders.beat("w", 1, dict.fromkeys(roles, 2), epoch=epoch), 1, T0)
    worker = fleet.worker("w", roles[-1])
    assert worker is not None and worker.free == 2
    return fleet, worker


def test_fleet_ignores_reports_about_earlier_epoch() -> None:
    fleet, worker = joined(Role.DECODE, epoch=2)
    fleet.add_request(worker, 10)
    fleet.release(("w", 1), Role.DECODE, 10)
    fleet.of("tiny").set_pace(("w", 1), Role.DECODE, 3.0)
    fleet.pause(("w", 1), Role.DECODE)
    assert (worker.running, worker.pace, worker.paused) == (1, 1.0, False)
    fleet.release(("w", 2), Role.DECODE, 10)
    assert worker.running == 0


def test_fleet_counts_work_of_dropped_role_until_it_is_done() -> None:
    fleet, prefill = joined(Role.DECODE, Role.PREFILL)
    fleet.add_request(prefill, 10)
    fleet.apply(builders.registration("w", Role.DECODE), 2, T0)
    assert not fleet.of("tiny").pools[Role.PREFILL].workers
    assert [worker.worker_id for worker in fleet.of("tiny").pools[Role.DECODE].workers] == ["w"]
    fleet.release(("w", 1), Role.PREFILL, 10)
    assert prefill.running == 0 and not fleet.of("tiny").pools[Role.PREFILL].workers


def test_fleet_ignores_role_without_lease() -> None:
    fleet = Fleet(ROUTER)
    record = builders.registration("w", Role.DECODE)
    fleet.apply(builders.registration("w", Role.DECODE, Role.PREFILL, leases=record.leases), 0, T0)
    fleet.apply(builders.beat("w", 1, {Role.DECODE: 2, Role.PREFILL: 2}), 1, T0)
    assert fleet.worker("w", Role.PREFILL) is None and not fleet.of("tiny").has_living(
        Role.PREFILL, T0
    )
    assert fleet.of("tiny").has_living(Role.DECODE, T0)

"""Which of several workers: what is not told case by case in `test_placer.py`."""

from schemas.records import Role
from tests.streams.core.placement.placer_fixture import PlacerFixture, case


def _scene() -> PlacerFixture:
    scene = PlacerFixture(policy="static", local_share=0.0)
    scene.workers(Role.PREFILL, "p0", "p1")
    scene.workers(Role.DECODE, "d0", "d1", "d2")
    return scene


def _alone(scene: PlacerFixture) -> list[str]:
    """The workers of a request that comes when nobody has anything to do."""
    placed, fleet = scene.place(case()), scene.fleet
    assert placed is not None
    workers = [worker for worker in (placed.prefill, placed.decode) if worker is not None]
    for worker in workers:
        fleet.add_request(worker, 100)
        fleet.release(worker.life, worker.role, 100)
    return [worker.worker_id for worker in workers]


def test_idle_workers_take_turns() -> None:
    scene = _scene()
    placed = [_alone(scene) for _ in range(6)]
    assert [prefill for prefill, _ in placed] == ["p0", "p1"] * 3
    assert [decode for _, decode in placed] == ["d0", "d1", "d2"] * 2


def test_worker_turns_outlive_pool_change() -> None:
    scene = _scene()
    assert [_alone(scene)[1] for _ in range(4)] == ["d0", "d1", "d2", "d0"]
    scene.workers(Role.DECODE, "d3")
    assert [_alone(scene)[1] for _ in range(4)] == ["d3", "d1", "d2", "d0"]

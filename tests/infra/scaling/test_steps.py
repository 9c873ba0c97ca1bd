"""From the workers that are there to those that are to be there."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from infra.scaling.fleet_meter import LLM
from infra.scaling.steps import DrainWorker, MoveWorker, StartWorker, steps
from schemas.records import Role

PREFILL, DECODE = Role.PREFILL, Role.DECODE


def test_steps_move_spare_worker_to_other_pool() -> None:
    workers = {PREFILL: ["p0", "p1"], DECODE: ["d0"]}
    assert steps(workers, {PREFILL: 1, DECODE: 2}) == [MoveWorker("p1", DECODE)]
    assert steps(workers, {PREFILL: 1, DECODE: 3}) == [
        MoveWorker("p1", DECODE),
        StartWorker(DECODE),
    ]
    assert steps(workers, {PREFILL: 1, DECODE: 1}) == [DrainWorker("p1")]
    assert steps(workers, {PREFILL: 2, DECODE: 1}) == []


def test_steps_keep_pools_without_target_and_never_move_retrieval() -> None:
    workers = {PREFILL: ["p0"], Role.REPLICA: ["x0", "x1"]}
    assert steps(workers, {PREFILL: 1, DECODE: 1, Role.RETRIEVAL: 4}) == [StartWorker(DECODE)]


@given(st.tuples(*(st.tuples(st.integers(0, 5), st.integers(0, 5)) for _ in LLM)))
def test_steps_bring_each_pool_to_its_target(pools: tuple[tuple[int, int], ...]) -> None:
    workers: dict[Role, Sequence[str]] = {
        role: [f"{role}-{n}" for n in range(there)]
        for role, (there, _) in zip(LLM, pools, strict=True)
    }
    targets = {role: target for role, (_, target) in zip(LLM, pools, strict=True)}
    roles_by_name = {name: role for role, names in workers.items() for name in names}
    started = []
    for step in steps(workers, targets):
        match step:
            case StartWorker(role):
                started.append(role)
            case DrainWorker(name):
                del roles_by_name[name]
            case MoveWorker(name, role):
                roles_by_name[name] = role
    assert [[*roles_by_name.values(), *started].count(role) for role in LLM] == [*targets.values()]
    assert not started or len(roles_by_name) == sum(map(len, workers.values())), (
        "nobody leaves meanwhile"
    )

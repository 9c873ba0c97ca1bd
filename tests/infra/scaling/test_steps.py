"""From the workers that are there to those that are to be there."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from infra.scaling.pools import LLM, PoolKey
from infra.scaling.steps import DrainWorker, MoveWorker, ReloadWorker, StartWorker, Step, steps
from schemas.records import Role

PREFILL, DECODE, REPLICA = (PoolKey(role) for role in LLM)


def test_steps_move_spare_worker_to_other_pool() -> None:
    workers = {PREFILL: ["p0", "p1"], DECODE: ["d0"]}
    assert steps(workers, {PREFILL: 1, DECODE: 2}) == [MoveWorker("p1", Role.DECODE)]
    assert steps(workers, {PREFILL: 1, DECODE: 3}) == [
        MoveWorker("p1", Role.DECODE),
        StartWorker(DECODE),
    ]
    assert steps(workers, {PREFILL: 1, DECODE: 1}) == [DrainWorker("p1")]
    assert steps(workers, {PREFILL: 2, DECODE: 1}) == []


def test_steps_keep_pools_without_target_and_never_move_retrieval() -> None:
    workers = {PREFILL: ["p0"], REPLICA: ["x0", "x1"]}
    targets = {PREFILL: 1, DECODE: 1, PoolKey(Role.RETRIEVAL): 4}
    assert steps(workers, targets) == [StartWorker(DECODE)]


def test_steps_reload_only_what_own_model_can_spare() -> None:
    a_prefill, a_decode = PoolKey(Role.PREFILL, "a"), PoolKey(Role.DECODE, "a")
    b_replica = PoolKey(Role.REPLICA, "b")
    workers = {a_prefill: ["p0", "p1", "p2"], a_decode: ["d0"], b_replica: ["x0"]}
    assert steps(workers, {a_prefill: 1, a_decode: 2, b_replica: 3}) == [
        MoveWorker("p2", Role.DECODE),
        ReloadWorker("p1", b_replica),
        StartWorker(b_replica),
    ]


POOLS = [PoolKey(role, model) for model in ("a", "b") for role in LLM]
Counts = st.tuples(st.integers(0, 5), st.integers(0, 5))


@given(st.tuples(*(Counts for _ in POOLS)))
def test_steps_bring_each_pool_to_its_target(counts: tuple[tuple[int, int], ...]) -> None:
    workers: dict[PoolKey, Sequence[str]] = {
        pool: [f"{pool.role}-{pool.model}-{n}" for n in range(there)]
        for pool, (there, _) in zip(POOLS, counts, strict=True)
    }
    targets = {pool: target for pool, (_, target) in zip(POOLS, counts, strict=True)}
    by_name = {name: pool for pool, names in workers.items() for name in names}
    started: list[PoolKey] = []
    for step in steps(workers, targets):
        follow(step, by_name, started)
    assert [[*by_name.values(), *started].count(pool) for pool in POOLS] == [*targets.values()]
    assert not started or len(by_name) == sum(map(len, workers.values())), "nobody leaves meanwhile"


def follow(step: Step, by_name: dict[str, PoolKey], started: list[PoolKey]) -> None:
    match step:
        case StartWorker(pool):
            started.append(pool)
        case DrainWorker(name):
            del by_name[name]
        case MoveWorker(name, role):
            by_name[name] = PoolKey(role, by_name[name].model)
        case ReloadWorker(name, pool):
            assert by_name[name].model != pool.model, "within a model the engine stays up"
            by_name[name] = pool

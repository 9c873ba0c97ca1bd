"""Points of the grid, and the tables that are made of them."""

import json
from dataclasses import replace

from infra.planning import authors_serving, plan_table, runs
from infra.planning.grid import (
    CONFIGS,
    LEVELS,
    LOADS_PER_S,
    TIMEOUT_MS,
    WORKLOADS,
    Config,
    static,
)
from infra.planning.point import ORDERS, Spec, make_cluster, run
from infra.planning.runs import Points
from infra.simulator.cluster import ORCHESTRATIONS, READY_MS
from infra.simulator.shape import ClusterShape
from schemas.records import Orchestration
from tests.infra.planning.points import LOADS, PART, every, on_part

POOLS = "2P2D"
LEARNED = Config(pools=POOLS, policy="learned")


def test_grid_equals_grid_of_paper() -> None:
    assert (len(WORKLOADS), len(LOADS_PER_S), len(CONFIGS), len(set(CONFIGS))) == (18, 10, 17, 17)
    """A load of 10 belongs to no class."""
    levelled = [load for loads in LEVELS.values() for load in loads]
    assert levelled == [load for load in LOADS_PER_S if load != 10.0]
    for config in CONFIGS:
        shape = ClusterShape.parse(config.pools)
        assert shape.prefill + shape.decode + shape.replica == 4
        assert shape.name == config.pools


def test_plan_table_uses_only_training_half() -> None:
    point_list = list(every(static(POOLS, "0"), load_seen=0.2))
    point_list += every(static(POOLS, "1"), load_seen=0.4, cost_ttft=60.0, cost_tpot=11.0)
    points = Points(point_list)
    train, test = plan_table.halves(3, points)
    assert len(train) == len(test) == 90 and not set(train) & set(test)
    table = plan_table.table_of(points, POOLS, train)
    cells = list(table.cells.values())
    assert {(round(c.gain_ttft, 6), round(c.loss_tpot, 6)) for c in cells} == {(0.4, 0.1)}
    profiles = {(w.profile.first, w.profile.later) for w in WORKLOADS if w.name in dict(train)}
    assert len({cell.bin[:3] for cell in cells}) == len(profiles)
    assert table.from_dict(json.loads(json.dumps(table.to_dict()))).cells == table.cells


def test_points_of_pairs_loads_with_runs() -> None:
    spec = Spec(config=LEARNED, workload=WORKLOADS[0], loads_per_s=(2.0, 1.0, 4.0), seed=1)
    points = runs.points_of(spec)
    assert [p.load_per_s for p in points] == [1.0, 2.0, 4.0]
    alone = replace(spec, config=static(POOLS, "0"))
    assert runs.points_of(alone)[0] == run(replace(alone, loads_per_s=(2.0,)))[0]
    request_counts = {p.load_per_s: p.requests for p in runs.points_of(alone)}
    assert request_counts == {p.load_per_s: p.requests for p in points}


def test_full_receive_buffer_crashes_plain_disaggregation() -> None:
    crowded = next(w for w in WORKLOADS if w.name == "large, long gen")
    spec = Spec(config=static("3P1D", "0", plain=True), workload=crowded, loads_per_s=(8,), seed=1)
    crashed_run = run(spec)[0]
    assert crashed_run.crashed == 1 and crashed_run.failed > crashed_run.requests / 2
    assert crashed_run.buffered_bytes > authors_serving.RECEIVE_BUFFER_BYTES
    for config in (static("3P1D", "1", plain=True), static("3P1D", "0")):
        stable_run = run(replace(spec, config=config))[0]
        assert (stable_run.crashed, stable_run.failed) == (0, 0)
        assert stable_run.longest_ms < TIMEOUT_MS and stable_run.tokens_per_s > 1_000


def test_remote_turns_use_default_vllm_orders() -> None:
    """Other orders need `all_orders` in the configuration."""
    assert ORDERS == (Orchestration.PREFILL_FIRST,)
    config = Config(pools="1P1D", policy="learned")
    for variant, expected_orders in (
        (config, ORDERS),
        (replace(config, all_orders=True), ORCHESTRATIONS),
    ):
        spec = Spec(config=variant, workload=WORKLOADS[0], loads_per_s=(), seed=1)
        cluster = make_cluster(spec)
        cluster.pass_ms(READY_MS)
        for name in ("prefill-0", "decode-0"):
            registration = cluster.members.view.members[name].registration
            assert registration is not None and registration.capability is not None
            assert tuple(registration.capability.orchestrations) == expected_orders


def test_plan_table_places_turns_by_weights() -> None:
    """The weights of a request decide, behind the authors' proxy."""
    pools = "2P2D"
    points = list(on_part(static(pools, "0", plain=True), load_seen=0.2))
    points += on_part(
        static(pools, "1", plain=True), load_seen=0.2, decode_ttft=60.0, every_decode_tpot=12.0
    )
    use = [(workload.name, load) for workload in PART for load in LOADS]
    table = plan_table.table_of(Points(points), pools, use, plain=True)
    assert {(round(c.gain_ttft, 6), round(c.loss_tpot, 6)) for c in table.cells.values()} == {
        (0.4, 0.2)
    }
    config = Config(pools=pools, policy="table", plain=True)
    for w_tpot, local in ((1.0, 1.0), (3.0, 0.0)):
        spec = Spec(
            config=config,
            workload=PART[0],
            loads_per_s=(4.0,),
            seed=1,
            table=table,
            weights=(1.0, w_tpot),
        )
        [result_point] = runs.points_of(spec)
        assert result_point.later and result_point.local == local * result_point.later

"""Comparing on live stacks of simulated engines, through their gateways."""

from pathlib import Path

import pytest
from rich.console import Console

from infra.planning import live_stack
from infra.planning.live_conversations import LiveTurn
from infra.research.live import comparison
from schemas.errors import ConfigError
from tests.e2e.harness import lasting_stack
from tests.long_leases import long_leases
from tests.waits import START_S

WORKLOAD = "large, mid paste"


def test_choose_loads_scales_workloads_and_refuses_unknown() -> None:
    sizes = {"turns": 3, "conversations": 5, "streams": 2, "scale": 1 / 64, "seed": 1}
    slow_load, fast_load = comparison.choose_loads([WORKLOAD], [1.0, 8.0], **sizes)  # type: ignore[arg-type]  # by name
    assert (slow_load.first_words, slow_load.first_tokens, slow_load.words, slow_load.tokens) == (
        16,
        16,
        4,
        4,
    )
    assert [load.name for load in (slow_load, fast_load)] == [
        f"{WORKLOAD} at 1/s",
        f"{WORKLOAD} at 8/s",
    ]
    begins = fast_load.begins_s()
    assert begins == sorted(begins) and len(begins) == 5 and begins[-1] < slow_load.begins_s()[-1]
    with pytest.raises(ConfigError, match="expected one of small, tiny; .* found 'huge'"):
        comparison.choose_loads(["huge"], [1.0], **sizes)  # type: ignore[arg-type]  # by name


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(1_800)
async def test_comparison_runs_and_reports_chosen_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = (
        live_stack.RoutingVariant(name="x=0"),
        live_stack.RoutingVariant(name="decode first", orchestration="decode_first"),
        live_stack.LOCAL,
    )
    monkeypatch.setitem(
        live_stack.DEPLOYMENTS,
        "sim",
        (live_stack.Deployment(name="sim", engine=live_stack.SIM.engine, variants=ways),),
    )
    monkeypatch.setattr(comparison, "BENCH_DIR", tmp_path)
    monkeypatch.setattr(live_stack, "Stack", lasting_stack)
    monkeypatch.setattr(live_stack, "_RESTART_S", START_S)
    loads = comparison.choose_loads(
        [WORKLOAD], [8.0], turns=2, conversations=3, streams=3, scale=1 / 32, seed=1
    )
    with long_leases():  # who is slow is there all the same
        results = await comparison.run("sim", loads, Console(quiet=True))
    (rows,) = results.values()
    local = {way: row["local_share"] for way, row in rows.items()}
    assert local == {"x=0": 0.0, "decode first": 0.0, "x=1": 1.0}
    assert all(row["answers"] == 6 and row["different"] == 0 for row in rows.values())
    assert rows["x=0"]["kv_bytes"] > rows["x=1"]["kv_bytes"] == 0
    # Prefill reads the answer's KV back from decode before it computes, and then sends no less.
    assert rows["decode first"]["kv_bytes"] > rows["x=0"]["kv_bytes"]
    page = comparison.write("sim", loads, results, tmp_path / "out")
    assert f"{WORKLOAD} at 8/s" in page.read_text()
    assert {path.suffix for path in page.parent.iterdir()} == {".html", ".json", ".png"}
    with pytest.raises(ConfigError, match="--only: expected some of sim, found push"):
        await comparison.run("sim", loads, Console(quiet=True), ["push"])


def test_figures_attribute_kv_bytes_to_turns() -> None:
    turns = [
        [LiveTurn(number=n, request_id=f"r{c}{n}", mode="remote") for n in (1, 2, 3)]
        for c in (1, 2)
    ]
    moved = {"r11": 1, "r21": 2, "r12": 10, "r13": 20, "r22": 30, "r23": 40, "another": 500}
    result = comparison.figures(turns, turns, moved)
    assert (result["kv_bytes_turn_1"], result["kv_bytes"]) == (3, 100)

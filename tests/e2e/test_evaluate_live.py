"""Evaluating and planning on live stacks of simulated engines, through their gateways."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from infra.evaluate import live, live_plan
from infra.evaluate.conversations import Load, Turn
from schemas.errors import ConfigError
from schemas.settings import LogSettings
from streams.core.table import Table
from tests.e2e.harness import sim_settings, stack
from tests.infra.test_cli import trivium

WORKLOAD = "large, mid paste"


def test_parts_of_the_grid_are_scaled_and_others_refused() -> None:
    sizes = {"turns": 3, "conversations": 5, "streams": 2, "scale": 1 / 64, "seed": 1}
    one, two = live.chosen([WORKLOAD], [1.0, 8.0], **sizes)  # type: ignore[arg-type]  # by name
    assert (one.first_words, one.first_tokens, one.words, one.tokens) == (16, 16, 4, 4)
    assert [each.name for each in (one, two)] == [f"{WORKLOAD} at 1/s", f"{WORKLOAD} at 8/s"]
    begins = two.begins_s()
    assert begins == sorted(begins) and len(begins) == 5 and begins[-1] < one.begins_s()[-1]
    with pytest.raises(ConfigError, match="expected one of small, tiny; .* found 'huge'"):
        live.chosen(["huge"], [1.0], **sizes)  # type: ignore[arg-type]  # by name


@pytest.mark.kafka
@pytest.mark.timeout(300)
async def test_a_chosen_part_runs_live_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = (live.Way(name="x=0"), live.LOCAL)
    monkeypatch.setitem(
        live.DEPLOYMENTS, "sim", (live.Deployment(name="sim", engine=live.SIM.engine, ways=ways),)
    )
    monkeypatch.setattr(live, "BENCH_DIR", tmp_path)
    loads = live.chosen(
        [WORKLOAD], [8.0], turns=2, conversations=3, streams=3, scale=1 / 32, seed=1
    )
    found = await live.run("sim", loads, Console(quiet=True))
    (rows,) = found.values()
    assert {way: row["local_share"] for way, row in rows.items()} == {"x=0": 0.0, "x=1": 1.0}
    assert all(row["answers"] == 6 and row["different"] == 0 for row in rows.values())
    assert rows["x=0"]["kv_bytes"] > rows["x=1"]["kv_bytes"] == 0
    page = live.write("sim", loads, found, tmp_path / "out")
    assert f"{WORKLOAD} at 8/s" in page.read_text()
    assert {path.suffix for path in page.parent.iterdir()} == {".html", ".json", ".png"}
    with pytest.raises(ConfigError, match="--only: expected some of sim, found push"):
        await live.run("sim", loads, Console(quiet=True), ["push"])


@pytest.mark.kafka
@pytest.mark.timeout(300)
async def test_a_running_cluster_is_planned_through_its_gateway(
    kafka: LogSettings, tmp_path: Path
) -> None:
    probe, made = tmp_path / "probe.json", tmp_path / "ppd.json"
    code, output, errors = trivium("plan", "probe", "--out", str(probe))
    assert (code, f"written: {probe}" in output) == (0, True), errors
    settings = sim_settings(kafka, router={"policy": "table", "table": str(probe)})
    async with stack(settings, tmp_path, prefill=1, decode=1) as running:
        arguments = ["--url", running.gateway_urls[0], "--quick", "--conversations", "3"]
        code, output, errors = trivium("plan", "ppd", *arguments, "--out", str(made))
    assert (code, f"written: {made} (2 cells)" in output) == (0, True), errors
    table = Table.from_dict(json.loads(made.read_text()))
    assert [len(table.edges[axis]) for axis in ("context_tokens", "new_tokens")] == [1, 1]
    assert {cell.samples for cell in table.cells.values()} == {6}


def test_a_cluster_that_does_not_obey_is_not_measured() -> None:
    turns = [Turn(number=number, mode="local") for number in (1, 2, 2)]
    live_plan.check("local", turns)
    with pytest.raises(ConfigError, match="expected remote placements .* found 0 of 2; start"):
        live_plan.check("remote", turns)


async def test_no_gateway_is_an_error() -> None:
    with pytest.raises(ConfigError, match="expected a gateway at http://127.0.0.1:9"):
        await live_plan.measure("http://127.0.0.1:9", [Load()], lambda: None)

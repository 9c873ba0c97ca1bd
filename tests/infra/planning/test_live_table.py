"""Measuring tables on live stacks of simulated engines, through their gateways."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from infra.planning import live_table
from infra.planning.live_conversations import LiveLoad, LiveTurn
from infra.planning.plan_table import TurnMeasurement
from schemas.errors import ConfigError
from schemas.settings import LogSettings
from streams.core.placement.ppd_table import AXES, PpdTable
from tests.e2e.harness import sim_settings, stack
from tests.infra.cli.trivium_runner import trivium


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(1_800)
async def test_plan_measures_running_cluster_through_gateway(
    kafka: LogSettings, tmp_path: Path
) -> None:
    probe, plan_file = tmp_path / "probe.json", tmp_path / "ppd.json"
    code, output, errors = trivium("plan", "ppd", "--probe", "--out", str(probe))
    assert (code, f"written: {probe}" in output) == (0, True), errors
    by_table = {"policy": "table", "table": str(probe)}
    # Turns last far longer than a starved client takes to ask, or those of many would not meet.
    settings = sim_settings(kafka, router=by_table, prefill_base_ms=120.0, decode_step_ms=15.0)
    async with stack(settings, tmp_path, prefill=1, decode=1) as running:
        config = str(running.folder / "stack.toml")
        arguments = ["--url", running.gateway_urls[0], "--config", config, "--quick"]
        for streams, cells in (([], 2), (["--streams", "1", "--streams", "12"], 4)):
            options = ["--conversations", "3", *streams, "--out", str(plan_file)]
            command = ("plan", "ppd", *arguments, *options)
            code, output, errors = await asyncio.to_thread(trivium, *command)
            assert (code, f"written: {plan_file} ({cells} cells)" in output) == (0, True), errors
            table = PpdTable.from_dict(json.loads(plan_file.read_text()))
            sizes = {axis: len(edges) for axis, edges in table.edges.items()}
            assert sizes == {**dict.fromkeys(AXES, 1), "load": len(streams) // 4}
    assert sorted(cell.samples for cell in table.cells.values()) == [6, 6, 24, 24]
    (edge,) = table.edges["load"]
    assert edge > 0.5  # at most one of two workers is at work while one asks


def test_kinds_repeat_at_each_load() -> None:
    def list_kinds(*streams: int, quick: bool) -> list[tuple[str, int, int]]:
        loads = live_table.kinds(conversations=4, streams=streams, seed=1, quick=quick)
        assert len({load.name for load in loads}) == len(loads)  # they are not one conversation
        return [(load.name.split()[0], load.streams, load.conversations) for load in loads]

    assert list_kinds(quick=True) == [("40+8/8", 2, 4), ("300+240/64", 2, 4)]
    assert list_kinds(6, 1, 6, quick=True)[:2] == [("40+8/8", 1, 4), ("40+8/8", 6, 6)]
    assert {streams for _, streams, _ in list_kinds(quick=False)} == {2, 8}


def test_table_has_cell_for_each_kind_and_load() -> None:
    loads = live_table.kinds(conversations=1, streams=(1, 2, 8), seed=1, quick=False)
    rng = random.Random(1)  # tokens of as many words differ, and hardly two runs see one load
    measurements = [
        TurnMeasurement(
            context_tokens=2 * load.first_words + rng.randrange(9),
            new_tokens=2 * load.words + rng.randrange(9),
            answer_tokens=load.tokens,
            load=load.streams / 2 - rng.random() / 4,
            gain_ttft=number,
            loss_tpot=0.0,
            samples=1,
        )
        for number, load in enumerate(loads)
    ]
    table = live_table.table_of(loads, measurements)
    assert [len(table.edges[axis]) for axis in AXES] == [1, 2, 1, 2]
    assert len(table.cells) == len(loads) == 36
    for measurement in measurements:
        lengths = (measurement.context_tokens, measurement.new_tokens, measurement.answer_tokens)
        cell = table.find(table.bin_of(*lengths, measurement.load))
        assert cell is not None
        assert cell.gain_ttft == measurement.gain_ttft


def test_mean_router_load_averages_later_turns() -> None:
    log = LogSettings(bootstrap="kafka:9092", topic_prefix="a.")
    turns = [LiveTurn(number=n, request_id=name) for n, name in ((1, "r1"), (2, "r2"), (2, "r3"))]
    assert live_table.mean_router_load(turns, {"r1": 9.0, "r2": 1.0, "r3": 2.0}, log) == 1.5
    with pytest.raises(ConfigError, match="expected 2 placements on a.decisions at kafka:9092, fo"):
        live_table.mean_router_load(turns, {"r1": 9.0, "r2": 1.0}, log)


def test_check_refuses_cluster_with_other_placements() -> None:
    turns = [LiveTurn(number=number, mode="local") for number in (1, 2, 2)]
    live_table.check("local", turns)
    with pytest.raises(ConfigError, match="expected remote placements .* found 0 of 2; start"):
        live_table.check("remote", turns)


async def test_measure_reports_missing_gateway() -> None:
    with pytest.raises(ConfigError, match="expected a gateway at http://127.0.0.1:9"):
        await live_table.measure("http://127.0.0.1:9", LogSettings(), [LiveLoad()], lambda: None)

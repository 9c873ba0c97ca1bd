"""The serving benchmark's peers answer alike, and its figures and bars follow from its cells."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infra.bench.serving.cells import QUICK, TOKENS, Options, keeps_up, make_bodies
from infra.bench.serving.contenders import DIRECT, NAMES, SIM, _baselines
from infra.bench.serving.figures import (
    Cells,
    bars,
    closed_figures,
    closed_table,
    cpu_table,
    open_figures,
    open_table,
    other_cpu_share,
)
from infra.bench.serving.load_generator import OfferedLoad, measure
from infra.bench.serving.main import parse
from infra.bench.serving.plot import plot
from infra.bench.serving.proxies import prefill_body
from workers.llm.models.sim import make_sim_model


def cell(rate: float, ttft_ms: float, cpu_ms: float = 2.0, **errors: int) -> dict[str, Any]:
    times = {"p50": ttft_ms, "p90": ttft_ms, "p99": 2 * ttft_ms}
    return {
        "requests": 10,
        "errors": errors,
        "requests_per_s": rate,
        "ttft_ms": times,
        "gap_ms": times,
        "answer_ms": times,
        "tokens_per_read": 1.0,
        "client_cpu_share": 0.1,
        "other_cpu_share": 0.2,
        "cpu_ms": {"engine": cpu_ms},
    }


CLOSED: Cells = {
    "direct": {64: [cell(190, 20), cell(180, 22)], 256: [cell(600, 40)] * 2,
               512: [cell(900, 60)] * 2},
    "httpx": {64: [cell(80, 400), cell(90, 300)], 256: [cell(40, 3_000)] * 2},
    "aiohttp": {64: [cell(188, 27)] * 2, 256: [cell(460, 170, 3)] * 2, 512: [cell(600, 400)] * 2},
    "replica": {64: [cell(185, 28), cell(186, 31)], 256: [cell(650, 60, 2)] * 2,
                512: [cell(1_100, 100)] * 2},
    "remote": {64: [cell(170, 55)] * 2, 256: [cell(400, 90)] * 2},
}  # fmt: skip


def test_bars_follow_from_the_cells() -> None:
    found = {bar.name: bar for bar in bars(CLOSED)}
    assert len(found) == 10
    assert found["replica, 64 streams: req/s over aiohttp"].value == pytest.approx(185.5 / 188)
    assert found["replica, 64 streams: TTFT p50 over direct"].value == 8.5
    assert found["replica, 256 streams: req/s over httpx"].value == 650 / 40
    assert found["replica, 256 streams: server CPU per request of aiohttp's"].value == 2 / 3
    missed = [bar.name for bar in bars(CLOSED) if not bar.met]
    assert missed == [
        "remote, 64 streams: TTFT p50 over direct", "remote, 256 streams: req/s over aiohttp",
    ]  # fmt: skip


def test_bars_of_what_was_not_measured_are_not_met() -> None:
    assert all(bar.value is None and not bar.met for bar in bars({}))


def test_figures_tables_and_picture(tmp_path: Path) -> None:
    open_cells: Cells = {"direct": {100.0: [cell(99, 20)], 400.0: [cell(200, 20)]}}
    figures = {
        "closed_loop": closed_figures(CLOSED),
        "open_loop": open_figures(open_cells, keeps_up),
    }
    assert figures["closed_loop"]["direct"]["64"]["requests_per_s"] == 185
    assert figures["open_loop"]["direct"]["kept_up_to_per_s"] == 100
    assert json.loads(json.dumps(figures)) == figures
    assert other_cpu_share(figures["closed_loop"]) == 0.2
    console = Console(record=True, width=120, file=(tmp_path / "out").open("w"))
    for table in (closed_table, cpu_table):
        console.print(table(figures["closed_loop"]))
    console.print(open_table(figures["open_loop"]))
    console.file.close()
    assert "aiohttp" in console.export_text()
    plot(figures, tmp_path / "serving.png")
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (cell(95, 20), True),
        (cell(80, 20), False),
        (cell(99, 600), False),
        (cell(99, 20, unfinished=1), False),
    ],
)
def test_keeping_up(found: dict[str, Any], kept: bool) -> None:
    assert keeps_up(100, found) is kept


def test_options() -> None:
    assert parse([]) == (Options(), False)
    assert parse(["--quick", "--json"]) == (QUICK, True)
    options, _ = parse(["--quick", "--streams", "1", "2", "--seconds", "3", "--peers", "direct"])
    assert (options.streams, options.seconds, options.peers) == ((1, 2), 3.0, ("direct",))
    assert options.repeats == QUICK.repeats and Options().repeats >= 5 and Options().peers == NAMES


def test_bodies_are_the_same_for_a_seed() -> None:
    assert make_bodies(1) == make_bodies(1) != make_bodies(2)
    assert len(set(make_bodies(1))) == len(make_bodies(1))


def test_the_prefill_call_asks_for_one_token() -> None:
    body = {"max_tokens": 64, "stream": True, "stream_options": {}, "max_completion_tokens": 64}
    first = prefill_body(body)
    assert (first["max_tokens"], first["max_completion_tokens"], first["stream"]) == (1, 1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] and "stream_options" not in first
    assert body["max_tokens"] == 64


@pytest.mark.timeout(300)
def test_direct_engine_and_proxies_answer_alike(tmp_path: Path) -> None:
    async def main() -> None:
        model = make_sim_model(tmp_path / "model")
        async with asyncio.timeout(200), _baselines(tmp_path, model) as peers:
            expected: list[str] = []
            for name in (DIRECT, "httpx", "aiohttp"):
                found = await measure(
                    OfferedLoad(
                        host="127.0.0.1",
                        port=peers[name].port,
                        bodies=make_bodies(1)[:8],
                        expected=expected,
                        tokens=TOKENS,
                        streams=8,
                        requests_max=8,
                    )
                )
                assert found.errors == {} and found.requests >= 8, name
                expected = expected or found.texts
            assert all(peers["httpx"].pids().values())

    asyncio.run(main())
    assert SIM["prefill_base_ms"] == 20 and SIM["decode_step_ms"] == 5

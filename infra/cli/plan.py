"""`trivium plan`: tables that policies look up, made by measuring beforehand."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Tables that policies look up, made by measuring beforehand.")


@app.callback()
def _group() -> None:
    """Tables that policies look up, made by measuring beforehand."""


@app.command("ppd")
def ppd(
    out: Annotated[Path, typer.Option(help="The table's file.")] = Path("build/plan/ppd.json"),
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Three loads instead of ten.")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals.")] = 1,
    jobs: Annotated[int, typer.Option(help="Processes.", show_default="one per core")] = 0,
) -> None:
    """PPD's table for the policy `table`: each kind of turn with x=0 and x=1, in the simulator.

    Then start routers with `policy = "table"` and `table = "FILE"` in the section router.
    """
    from infra.evaluate.grid import LOADS_PER_S
    from infra.evaluate.planning import plan
    from infra.evaluate.runs import runner
    from infra.simulator.cluster import Shape

    loads = LOADS_PER_S[1::4] if quick else LOADS_PER_S
    with runner(jobs or os.cpu_count() or 1) as pool:
        table = plan(pool, Shape(prefill=prefill, decode=decode).name, loads, seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(table.to_dict(), indent=1) + "\n")
    print(f"written: {out} ({len(table.cells)} cells)")

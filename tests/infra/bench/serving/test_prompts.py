"""What prompts cost by their length, as the serving benchmark tells it."""

from typing import Any

from infra.bench.serving.prompts import prompt_bars, prompt_table


def row(**fields: Any) -> dict[str, Any]:
    usual = {"requests": 20, "errors": {}, "ttft_ms_p50": 35.0}
    return {**usual, "cpu_ms": {"broker": 5.0, "gateway": 4.0, "replica": 9.0}, **fields}


FIGURES = {
    "replica": {
        "1000": row(bytes={"requests": 4_440.0, "usage": 260.0}),
        "100000": row(
            ttft_ms_p50=900.0,
            cpu_ms={"broker": 15.0, "gateway": 13.0, "replica": 400.0},
            bytes={"requests": 400_442.0, "prefixes": 100_000.0, "usage": 261.0},
        ),
    }
}


def test_prompt_table_names_growing_topics() -> None:
    table_rows = list(zip(*(column.cells for column in prompt_table(FIGURES).columns), strict=True))
    assert table_rows == [
        ("1000, replica", "35", "broker 5, gateway 4, replica 9", "rest 4700"),
        ("100000, replica", "900", "broker 15, gateway 13, replica 400",
         "requests 400442, prefixes 100000, rest 261"),
    ]  # fmt: skip


def test_prompt_bar_excludes_engine_process() -> None:
    (bar,) = prompt_bars(FIGURES)
    assert (bar.value, bar.met) == (28, True)
    (bar,) = prompt_bars({})
    assert (bar.value, bar.met) == (None, False)

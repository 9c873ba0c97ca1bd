"""The bars of the comparison with vLLM's serving."""

from typing import Any

import pytest

from infra.bench.vllm.closed_loop import LoadCell
from infra.bench.vllm.main import (
    BOTH,
    PAIR,
    REPLICAS,
    VLLM_PAIR,
    VLLM_REPLICAS,
    bars,
)


def measured(rate: float) -> list[dict[str, Any]]:
    return [{"requests_per_s": rate, "errors": {}, "ttft_ms": {"p50": 1.0}}]


def test_bars_average_cells_by_stream_count() -> None:
    cells = [LoadCell(streams=4, prompt_tokens=tokens, turns=1) for tokens in (60, 400)]
    rates = {PAIR: (2, 3), VLLM_PAIR: (1, 1), BOTH: (4, 4), REPLICAS: (4, 4), VLLM_REPLICAS: (5, 4)}
    result_bars = bars(
        {
            name: {cell: measured(rate) for cell, rate in zip(cells, pair, strict=True)}
            for name, pair in rates.items()
        }
    )
    values = {bar.name: bar.value for bar in result_bars}
    assert values["1P+1D, of vLLM's rate: 4 streams"] == pytest.approx(6**0.5)
    assert values["replicas, of vLLM's rate: 4 streams"] == pytest.approx(0.8**0.5)
    assert values["both roles, of the best of all: 4 streams"] == pytest.approx(0.8**0.5)
    assert values["Trivium's errors"] == 0

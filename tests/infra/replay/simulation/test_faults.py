"""Faults by name and time: what is struck, when, and what is refused."""

import pytest

from infra.replay.simulation.faults import faults_of
from infra.simulator.cluster import READY_MS
from schemas.errors import ConfigError

WORKERS = ["decode-1", "prefill-0"]


@pytest.mark.parametrize(
    ("kind", "text", "at_ms"),
    [
        ("kill", "decode-1@12.5s", [12_500.0]),
        ("kill", "decode-1@12.5s+4s", [12_500.0, 16_500.0]),
        ("stop", "prefill-0@1m", [60_000.0]),
        ("slow", "prefill-0@250ms+1m", [250.0, 60_250.0]),
        ("drain", "decode-1@0s", [0.0]),
        ("kill", "router@3s", [3_000.0]),
        ("stop", "router@3s+1s", [3_000.0]),
        ("kill", "broker@3s", [3_000.0]),
    ],
)
def test_faults_of_returns_times_of_faults(kind: str, text: str, at_ms: list[float]) -> None:
    struck = faults_of(kind, text, WORKERS)
    assert [fault.at_ms - READY_MS for fault in struck] == at_ms


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("kill", "decode-1", "expected NAME@TIME or"),
        ("kill", "decode-1@soon", "expected NAME@TIME or"),
        ("kill", "decode-1@3", "found 'decode-1@3'"),
        ("kill", "decode-7@3s", "expected any of decode-1, prefill-0, router, broker, found"),
        ("drain", "router@3s", "--drain: expected any of decode-1, prefill-0, found 'router'"),
    ],
)
def test_faults_of_refuses_unknown_faults(kind: str, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        faults_of(kind, text, WORKERS)

"""What `trivium usage` prints, and when it fails."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.app import app
from schemas.errors import ConfigError
from schemas.records import Usage
from tests.infra.story.test_usage import ONE


def invoke_usage(monkeypatch: pytest.MonkeyPatch, records: list[Usage], *options: str) -> Any:
    """The command over these records, all of one partition."""

    async def read(*_: object) -> AsyncIterator[tuple[int, Usage]]:
        for record in records:
            yield 0, record

    monkeypatch.setattr("infra.story.usage.read_usage", read)
    return CliRunner().invoke(app, ["usage", "--bootstrap", "127.0.0.1:1", *options])


def test_usage_command_prints_sums_with_total_row(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [replace(ONE, number=n, request_id=f"r{n}", tenant="ab"[n % 2]) for n in range(3)]
    result = invoke_usage(monkeypatch, records, "--by", "tenant")
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert result.exit_code == 0
    assert [row[:3] for row in rows if row[0] in ("a", "b", "all")] == [
        ["a", "2", "2"],
        ["b", "1", "1"],
        ["all", "3", "3"],
    ]


def test_usage_check_fails_on_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [ONE, replace(ONE, number=9, request_id="r2")]
    result = invoke_usage(monkeypatch, records, "--check", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["check"] == {
        "gaps": ["partition 0: number 9 where 8 was expected"],
        "repeats": [],
    }
    assert report["total"]["requests"] == 2
    assert invoke_usage(monkeypatch, records).exit_code == 0  # who does not ask is not told
    assert "repeats: none" in invoke_usage(monkeypatch, [ONE], "--check").stdout


def test_usage_command_rejects_unknown_grouping(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke_usage(monkeypatch, [], "--by", "tenant,colour")
    assert isinstance(result.exception, ConfigError)
    assert "--by: expected any of tenant, model, class" in result.exception.message

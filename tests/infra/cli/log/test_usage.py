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


def runs(monkeypatch: pytest.MonkeyPatch, records: list[Usage], *options: str) -> Any:
    """The command over these records, all of one partition."""

    async def read(*_: object) -> AsyncIterator[tuple[int, Usage]]:
        for record in records:
            yield 0, record

    monkeypatch.setattr("infra.story.usage.read_usage", read)
    return CliRunner().invoke(app, ["usage", "--bootstrap", "127.0.0.1:1", *options])


def test_sums_are_a_table_with_a_row_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [replace(ONE, number=n, request_id=f"r{n}", tenant="ab"[n % 2]) for n in range(3)]
    found = runs(monkeypatch, records, "--by", "tenant")
    rows = [line.split() for line in found.stdout.splitlines() if line.strip()]
    assert found.exit_code == 0
    assert [row[:3] for row in rows if row[0] in ("a", "b", "all")] == [
        ["a", "2", "2"],
        ["b", "1", "1"],
        ["all", "3", "3"],
    ]


def test_a_check_that_finds_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [ONE, replace(ONE, number=9, request_id="r2")]
    found = runs(monkeypatch, records, "--check", "--json")
    told = json.loads(found.stdout)
    assert found.exit_code == 1
    assert told["check"] == {
        "gaps": ["partition 0: number 9 where 8 was expected"],
        "repeats": [],
    }
    assert told["total"]["requests"] == 2
    assert runs(monkeypatch, records).exit_code == 0  # who does not ask is not told
    assert "repeats: none" in runs(monkeypatch, [ONE], "--check").stdout


def test_what_nobody_can_sum_by_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = runs(monkeypatch, [], "--by", "tenant,colour")
    assert isinstance(found.exception, ConfigError)
    assert "--by: expected any of tenant, model, class" in found.exception.message

"""What the audit of a log takes for what."""

from typing import Any

import pytest

from infra.bench.faults import log_audit
from schemas.records import Phase, PhaseKind, WorkPhase
from schemas.settings import LogSettings
from tests.infra.story.told_requests import work
from tests.streams.builders import continued, passage, phase, request, retrieved


async def test_what_was_found_is_no_workers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies among the phases."""
    received: Phase = phase(work(WorkPhase.DECODE, "d0", 5), PhaseKind.KV_RECEIVED, kv_bytes=7)
    records: dict[str, list[Any]] = {
        "requests": [request("r1")],
        "phases": [retrieved("r1", passage(1)), received, continued("r1", 1)],
    }

    async def read(log: LogSettings, topic: str) -> list[Any]:
        return records.get(topic, [])

    monkeypatch.setattr(log_audit, "read_topic", read)
    found = await log_audit.read_audit(LogSettings())
    assert found.phases == {"r1": [received]} and found.kv_bytes() == 7

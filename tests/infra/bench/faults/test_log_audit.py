"""What the audit of a log takes for what."""

from typing import Any

import pytest

from infra.bench.faults import log_audit
from schemas.records import Phase, PhaseKind, WorkPhase
from schemas.settings import LogSettings
from tests.infra.story.story_records import work
from tests.streams.builders import continued, passage, phase, request, retrieved


async def test_log_audit_excludes_retrieval_from_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of retrieval lie on the topic of phases."""
    received: Phase = phase(work(WorkPhase.DECODE, "d0", 5), PhaseKind.KV_RECEIVED, kv_bytes=7)
    records: dict[str, list[Any]] = {
        "requests": [request("r1")],
        "phases": [retrieved("r1", passage(1)), received, continued("r1", 1)],
    }

    async def read(log: LogSettings, topic: str) -> list[Any]:
        return records.get(topic, [])

    monkeypatch.setattr(log_audit, "read_topic", read)
    result = await log_audit.read_audit(LogSettings())
    assert result.phases == {"r1": [received]} and result.kv_bytes() == 7

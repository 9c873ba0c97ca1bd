"""/v1/batches: what callers may say, and what they see."""

from typing import Any

import httpx
import pytest

from schemas.records import BatchProgress
from streams.openai.objects.table import key_of
from tests.streams.gateway.batch_samples import file_of, line
from tests.streams.gateway.in_process import InProcessGateway, call

BATCHES = "/v1/batches"


async def uploaded(gateway: InProcessGateway, purpose: str = "batch", key: str = "one") -> str:
    async with gateway.client() as client:
        response = await client.post(
            "/v1/files",
            files={"file": ("a.jsonl", file_of(line()))},
            data={"purpose": purpose},
            headers={"authorization": f"Bearer {key}"},
        )
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def keeping() -> InProcessGateway:
    return InProcessGateway(api_keys=("one", "two"))


async def created(gateway: InProcessGateway, **fields: Any) -> tuple[int, Any]:
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    status, answer = await call(gateway, body, BATCHES, authorization="Bearer one")
    return status, answer


async def got(gateway: InProcessGateway, path: str, key: str = "one") -> httpx.Response:
    async with gateway.client() as client:
        return await client.get(path, headers={"authorization": f"Bearer {key}"})


async def test_batch_is_visible_to_its_tenant_alone() -> None:
    gateway = keeping()
    file_id = await uploaded(gateway)
    status, batch = await created(gateway, input_file_id=file_id, metadata={"a": "b"})
    assert (status, batch["status"], batch["object"]) == (200, "validating", "batch")
    assert batch["expires_at"] == batch["created_at"] + 86_400
    assert (batch["metadata"], batch["input_file_id"]) == ({"a": "b"}, file_id)
    path = f"{BATCHES}/{batch['id']}"
    assert (await got(gateway, path)).json() == batch
    assert (await got(gateway, path, "two")).status_code == 404
    assert (await got(gateway, BATCHES, "two")).json()["data"] == []
    async with gateway.client() as client:
        headers = {"authorization": "Bearer two"}
        assert (await client.post(path + "/cancel", headers=headers)).status_code == 404


async def test_batch_list_pages_are_newest_first() -> None:
    gateway = keeping()
    file_id = await uploaded(gateway)
    ids = [(await created(gateway, input_file_id=file_id))[1]["id"] for _ in range(5)]
    ids.sort(reverse=True)
    first = (await got(gateway, f"{BATCHES}?limit=3")).json()
    assert [batch["id"] for batch in first["data"]] == ids[:3] and first["has_more"]
    rest = (await got(gateway, f"{BATCHES}?limit=3&after={first['last_id']}")).json()
    assert [batch["id"] for batch in rest["data"]] == ids[3:] and not rest["has_more"]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"endpoint": "/v1/rerank"}, 400, "endpoint: expected one of /v1/chat/completions, /v1/"),
        ({"completion_window": "1h"}, 400, "completion_window: expected '24h', found '1h'"),
        ({"input_file_id": "file-none"}, 404, "no such file: 'file-none'"),
        ({"metadata": {"a": 1}}, 400, "metadata.a: expected a valid string, found 1"),
        ({"colour": "red"}, 400, "colour: unknown field"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 9}}, 400, "seconds: "),
    ],
)
async def test_batches_endpoint_rejects_invalid_fields(
    fields: dict[str, Any], status: int, message: str
) -> None:
    gateway = keeping()
    wishes = {"input_file_id": await uploaded(gateway), **fields}
    actual_status, answer = await created(gateway, **wishes)
    assert actual_status == status and message in answer["error"]["message"]
    assert len(gateway.objects.table) == 1, "the file alone"


async def test_batches_endpoint_rejects_file_of_other_purpose_or_tenant() -> None:
    gateway = keeping()
    file_id = await uploaded(gateway, "assistants")
    status, answer = await created(gateway, input_file_id=file_id)
    assert status == 400 and "of purpose batch, found assistants" in answer["error"]["message"]
    file_id = await uploaded(gateway, key="two")
    assert (await created(gateway, input_file_id=file_id))[0] == 404


async def test_batch_cancellation_is_accepted_until_end() -> None:
    """A cancelled batch reports its status and the results that it has."""
    gateway = keeping()
    _, batch = await created(gateway, input_file_id=await uploaded(gateway))
    path = f"{BATCHES}/{batch['id']}/cancel"
    for _ in range(2):
        status, cancelled = await call(gateway, {}, path, authorization="Bearer one")
        assert (status, cancelled["status"]) == (200, "cancelling")
        assert cancelled["cancelling_at"] >= batch["created_at"]
    table = gateway.objects.table.batches
    (record,) = [batch for tenant in table.open_tenants() for batch in table.open_batches(tenant)]
    progress = BatchProgress(
        batch_id=record.batch_id, tenant=record.tenant, status="cancelled", total=3, completed=1,
        output_file_id="file-o", output_bytes=9, error_file_id="file-e", prompt_tokens=5,
        completion_tokens=2, ended_ms=9_000, at_ms=9_000,
    )  # fmt: skip
    gateway.objects.table.apply(key_of(progress), progress)
    final_batch = (await got(gateway, f"{BATCHES}/{batch['id']}")).json()
    assert (final_batch["status"], final_batch["cancelled_at"], final_batch["completed_at"]) == (
        "cancelled",
        9,
        None,
    )
    assert (final_batch["output_file_id"], final_batch["error_file_id"]) == ("file-o", None)
    assert final_batch["request_counts"] == {"total": 3, "completed": 1, "failed": 0}
    assert final_batch["usage"]["total_tokens"] == 7
    status, answer = await call(gateway, {}, path, authorization="Bearer one")
    assert status == 400 and "has not ended, it is cancelled" in answer["error"]["message"]

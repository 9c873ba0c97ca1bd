"""Ids of responses: read by any gateway of the deployment, for the key that they were made for."""

import pytest

from schemas.errors import NotFound
from streams.calls.ids import from_public, new_request_id
from streams.openai.responses.response_id import RecordPosition, ResponseIds

KEY = "of-all-gateways-in-these-tests-01"
PLACE = RecordPosition(65_535, 2**63)


def test_response_id_is_readable_by_its_tenant_at_any_gateway() -> None:
    request_id = new_request_id(1_700_000_000_000)
    name = ResponseIds(KEY).name(request_id, "tenant", PLACE)
    assert ResponseIds(KEY).parse(name, "tenant") == (request_id, PLACE)
    assert from_public(name) == request_id
    assert name.startswith("resp_") and name.replace("_", "").replace("-", "").isalnum()
    for ids, tenant in ((ResponseIds(KEY), "other"), (ResponseIds(KEY + "2"), "tenant")):
        with pytest.raises(NotFound, match="not known"):
            ids.parse(name, tenant)


def test_response_ids_reject_changed_id() -> None:
    ids = ResponseIds(KEY)
    name = ids.name(new_request_id(1), "", PLACE)
    for i, char in enumerate(name):
        for replacement in ("A", "_", "é", "\0"):
            if replacement != char:
                with pytest.raises(NotFound):
                    ids.parse(name[:i] + replacement + name[i + 1 :], "")
    for wrong in ("", "resp_", name[:-1], name + "A", ids.name(new_request_id(1), "", None)):
        with pytest.raises(NotFound):
            ids.parse(wrong, "")

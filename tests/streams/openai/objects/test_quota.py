"""How much callers may keep."""

from dataclasses import replace

import pytest

from schemas.errors import TooManyRequests
from streams.openai.objects.quota import Quota
from streams.openai.objects.table import ObjectTable, key_of
from tests.streams.openai.objects.test_batches import BATCH
from tests.streams.openai.objects.test_table import STORE, file, result, store_file, table_of


def test_quota_limits_each_tenant_separately() -> None:
    quota = Quota(objects_max=4, bytes_max=40, tenants=2)
    table = table_of(file(bytes=9), STORE)
    with pytest.raises(
        TooManyRequests, match="2 files, stores, batches and c.* of yours.*more than 2"
    ):
        quota.check(table, [file("file-2")])
    quota.check(table, [file("file-2", tenant="u", bytes=20)])
    with pytest.raises(TooManyRequests, match="0 bytes of your files.*21 more.*more than 20"):
        quota.check(table, [file("file-2", tenant="u", bytes=21)])
    quota.check(table, [file(state="deleted")])  # no new one
    with pytest.raises(TooManyRequests, match="of yours"):
        quota.check(table, [STORE, store_file()])


def test_quota_always_accepts_results() -> None:
    quota = Quota(objects_max=3, bytes_max=1, tenant_objects_max=3, tenants=9)
    table = table_of(file(), STORE, store_file())
    quota.check(table, [result()])
    table.apply(key_of(result()), result())
    assert table.objects_of("t") == 3 and len(table) == 4
    with pytest.raises(
        TooManyRequests, match="3 files, stores, batches and conversations are kept"
    ):
        quota.check(table, [file("file-2", tenant="u")])


def test_quota_counts_batch_results_for_their_tenant_alone() -> None:
    """Results are always written; a tenant over its limit cannot create a batch."""
    quota = Quota(objects_max=40, bytes_max=40, tenants=2)
    table = table_of(file(bytes=39), file("file-2", bytes=90), BATCH)
    with pytest.raises(TooManyRequests, match="129 bytes of your files are kept"):
        quota.check(table, [replace(BATCH, batch_id="batch_2")])
    quota.check(table, [replace(BATCH, cancelled_ms=1)])
    quota.check(table, [file("file-3", tenant="u", bytes=19), replace(BATCH, tenant="u")])


def test_quota_without_keys_gives_one_tenant_all() -> None:
    quota = Quota(objects_max=2, bytes_max=10)
    quota.check(ObjectTable(), [file(tenant="", bytes=10), STORE])
    with pytest.raises(TooManyRequests, match="bytes of your files"):
        quota.check(ObjectTable(), [file(tenant="", bytes=11)])

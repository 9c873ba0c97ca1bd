"""How much callers may keep."""

from dataclasses import replace

import pytest

from schemas.errors import TooManyRequests
from streams.gateway.objects.quota import Quota
from streams.gateway.objects.table import ObjectTable, key_of
from tests.streams.gateway.objects.test_batches import BATCH
from tests.streams.gateway.objects.test_table import STORE, file, result, table_of, wanted


def test_one_tenant_does_not_fill_what_another_has() -> None:
    """(found 28)"""
    quota = Quota(objects_max=4, bytes_max=40, tenants=2)
    found = table_of(file(bytes=9), STORE)
    with pytest.raises(TooManyRequests, match="2 files, stores and batches of yours.*more than 2"):
        quota.check(found, [file("file-2")])
    quota.check(found, [file("file-2", tenant="u", bytes=20)])
    with pytest.raises(TooManyRequests, match="0 bytes of your files.*21 more.*more than 20"):
        quota.check(found, [file("file-2", tenant="u", bytes=21)])
    quota.check(found, [file(state="deleted")])  # no new one
    with pytest.raises(TooManyRequests, match="of yours"):
        quota.check(found, [STORE, wanted()])


def test_what_has_come_of_it_is_always_kept() -> None:
    quota = Quota(objects_max=3, bytes_max=1, tenant_objects_max=3, tenants=9)
    found = table_of(file(), STORE, wanted())
    quota.check(found, [result()])
    found.apply(key_of(result()), result())
    assert found.objects_of("t") == 3 and len(found) == 4
    with pytest.raises(TooManyRequests, match="3 files, stores and batches are kept"):
        quota.check(found, [file("file-2", tenant="u")])


def test_results_of_one_tenants_batches_use_up_nobody_elses_part() -> None:
    """Results are always written; whoever is over the limit begins no batch (review of 28)."""
    quota = Quota(objects_max=40, bytes_max=40, tenants=2)
    found = table_of(file(bytes=39), file("file-2", bytes=90), BATCH)
    with pytest.raises(TooManyRequests, match="129 bytes of your files are kept"):
        quota.check(found, [replace(BATCH, batch_id="batch_2")])
    quota.check(found, [replace(BATCH, cancelled_ms=1)])
    quota.check(found, [file("file-3", tenant="u", bytes=19), replace(BATCH, tenant="u")])


def test_without_keys_all_is_one_tenants() -> None:
    quota = Quota(objects_max=2, bytes_max=10)
    quota.check(ObjectTable(), [file(tenant="", bytes=10), STORE])
    with pytest.raises(TooManyRequests, match="bytes of your files"):
        quota.check(ObjectTable(), [file(tenant="", bytes=11)])

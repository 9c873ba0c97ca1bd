"""Receipts: a record is acknowledged after all earlier ones of its partition."""

import functools

from streams.log.faust.group import Receipts

PLACE, OTHER = ("t", 0), ("t", 1)


def test_receipts_acknowledge_records_in_partition_order() -> None:
    acknowledged: list[str] = []
    receipts = Receipts()
    first, second, third = (
        receipts.open(PLACE, functools.partial(acknowledged.append, name)) for name in "abc"
    )
    alone = receipts.open(OTHER, lambda: acknowledged.append("x"))
    third.settle()
    second.settle()
    assert acknowledged == []
    alone.settle()
    first.settle()
    assert acknowledged == ["x", "a", "b", "c"]


def test_receipt_waits_for_all_pending_results() -> None:
    acknowledged: list[str] = []
    receipts = Receipts()
    receipts.open(PLACE, lambda: acknowledged.append("nothing"), pending=0)
    assert acknowledged == ["nothing"]
    two = receipts.open(PLACE, lambda: acknowledged.append("two"), pending=2)
    receipts.open(PLACE, lambda: acknowledged.append("behind"), pending=0)
    two.settle()
    assert acknowledged == ["nothing"]
    two.settle()
    assert acknowledged == ["nothing", "two", "behind"]


def test_dropped_receipts_are_not_acknowledged() -> None:
    acknowledged: list[str] = []
    receipts = Receipts()
    before = receipts.open(PLACE, lambda: acknowledged.append("before"))
    receipts.drop()
    after = receipts.open(PLACE, lambda: acknowledged.append("after"))
    before.settle()
    assert acknowledged == []
    after.settle()
    assert acknowledged == ["after"]

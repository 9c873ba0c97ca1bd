"""Records are acknowledged in the order of their partition."""

import functools

from workers.search.service.receipts import Receipts


def test_records_are_acknowledged_in_the_order_of_their_partition() -> None:
    acknowledged: list[str] = []
    receipts = Receipts()
    place, other = ("t", 0), ("t", 1)
    first, second, third = (
        receipts.open(place, functools.partial(acknowledged.append, name)) for name in "abc"
    )
    alone = receipts.open(other, lambda: acknowledged.append("x"))
    receipts.close(place, third)
    receipts.close(place, second)
    assert acknowledged == []
    receipts.close(other, alone)
    receipts.close(place, first)
    assert acknowledged == ["x", "a", "b", "c"]


def test_what_was_taken_away_is_not_acknowledged() -> None:
    acknowledged: list[str] = []
    receipts = Receipts()
    before = receipts.open(("t", 0), lambda: acknowledged.append("before"))
    receipts.drop()
    after = receipts.open(("t", 0), lambda: acknowledged.append("after"))
    receipts.close(("t", 0), before)
    assert acknowledged == []
    receipts.close(("t", 0), after)
    assert acknowledged == ["after"]

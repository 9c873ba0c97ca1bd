"""Deadlines: in order, each once, and without what has ended in another way."""

from workers.deadlines import NEVER_MS, Deadlines


def test_deadlines_pop_expired_items_once_in_order() -> None:
    deadlines = Deadlines[str](lambda _item: True)
    for at_ms, item in ((30, "late"), (10, "early"), (20, "one"), (20, "two")):
        deadlines.add(at_ms, item)
    assert deadlines.next_ms() == 10
    assert list(deadlines.pop_expired(9)) == []
    assert list(deadlines.pop_expired(20)) == ["early", "one", "two"]
    assert deadlines.next_ms() == 30
    assert list(deadlines.pop_expired(100)) == ["late"] and deadlines.next_ms() == NEVER_MS


def test_deadlines_skip_ended_items() -> None:
    open_items = {"a", "b", "c"}
    deadlines = Deadlines[str](open_items.__contains__)
    for at_ms, item in enumerate("abc"):
        deadlines.add(at_ms, item)
    open_items.remove("a")
    expired_items = []
    for item in deadlines.pop_expired(9):
        expired_items.append(item)
        open_items.discard("c")
    assert expired_items == ["b"]


def test_deadlines_store_no_endless_or_ended_items() -> None:
    open_items: set[int] = set()
    deadlines = Deadlines[int](open_items.__contains__)
    deadlines.add(NEVER_MS, -1)
    assert not len(deadlines)
    for number in range(2_000):
        open_items.add(number)
        deadlines.add(number, number)
        open_items.discard(number - 5)
    assert len(deadlines) < 200 and deadlines.next_ms() == 1_995

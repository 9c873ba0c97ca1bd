"""Deadlines: in order, each once, and without what has ended in another way."""

from workers.deadlines import NEVER_MS, Deadlines


def test_what_has_passed_comes_earliest_first_and_once() -> None:
    kept = Deadlines[str](lambda _item: True)
    for at_ms, item in ((30, "late"), (10, "early"), (20, "one"), (20, "two")):
        kept.add(at_ms, item)
    assert kept.next_ms() == 10
    assert list(kept.pop_expired(9)) == []
    assert list(kept.pop_expired(20)) == ["early", "one", "two"]
    assert kept.next_ms() == 30
    assert list(kept.pop_expired(100)) == ["late"] and kept.next_ms() == NEVER_MS


def test_what_has_ended_is_skipped_and_what_ends_meanwhile_too() -> None:
    open_items = {"a", "b", "c"}
    kept = Deadlines[str](open_items.__contains__)
    for at_ms, item in enumerate("abc"):
        kept.add(at_ms, item)
    open_items.remove("a")
    found = []
    for item in kept.pop_expired(9):
        found.append(item)
        open_items.discard("c")
    assert found == ["b"]


def test_what_has_no_deadline_is_not_kept_and_what_has_ended_is_swept_out() -> None:
    open_items: set[int] = set()
    kept = Deadlines[int](open_items.__contains__)
    kept.add(NEVER_MS, -1)
    assert not len(kept)
    for number in range(2_000):
        open_items.add(number)
        kept.add(number, number)
        open_items.discard(number - 5)
    assert len(kept) < 200 and kept.next_ms() == 1_995

"""Queues of waiting searches: who comes first, and what has left by another way."""

from typing import Any

from workers.vector.engine.queues import NEVER_MS, Fifo, QueuedSearch, SearchQueues, SlackQueue
from workers.vector.index.kinds import SearchKind


def search(name: Any, kind: SearchKind = SearchKind.PREFILL, *, by_ms: float = NEVER_MS,
           extends: int = 1, arrived_ms: float = 0) -> QueuedSearch:  # fmt: skip
    return QueuedSearch(
        kind=kind,
        extends=extends,
        arrived_ms=arrived_ms,
        deadline_ms=by_ms,
        search=name,
        waits=True,
    )


def test_slack_queue_reorders_by_time_per_extend() -> None:
    queue = SlackQueue()
    short, long = search("short", by_ms=10, extends=1), search("long", by_ms=12, extends=9)
    queue.add(short)
    queue.add(long)
    assert queue.head(0.1) is short  # 9.9 before 11.1
    assert queue.head(1.0) is long  # 3 before 9
    assert long.slack_ms(now_ms=1, ms_per_extend=1.0) == 2


def test_slack_queue_orders_ties_by_arrival_and_skips_departed() -> None:
    queue, items = SlackQueue(), [search(i, by_ms=5) for i in range(4)]
    for item in items:
        queue.add(item)
    items[0].waits = False
    head = queue.head(1.0)
    assert head is items[1]
    queue.pop(head)
    items[2].waits = False
    queue.sweep()
    assert list(queue) == [items[3]]


def test_fifo_skips_departed_searches() -> None:
    items = [search(i) for i in range(3)]
    queue = Fifo(items)
    items[0].waits = False
    assert queue.first() is items[1] and len(queue) == 2
    items[2].waits = False
    queue.sweep()
    assert list(queue) == [items[1]]


def test_search_queues_keep_each_class_until_taken() -> None:
    waiting = SearchQueues()
    items = {kind: search(kind, kind, by_ms=9 + i) for i, kind in enumerate(SearchKind)}
    for item in items.values():
        item.waits = False
        waiting.add(item)
    assert len(waiting) == 3 and waiting.next_deadline_ms() == 9
    searches: list[QueuedSearch] = []
    assert [waiting.take(waiting.decode, limit, searches) for limit in (0, 2)] == [0, 1]
    assert searches == [items[SearchKind.DECODE]]
    assert waiting.take_prefill(1.0) is items[SearchKind.PREFILL]
    assert waiting.counts == {SearchKind.PREFILL: 0, SearchKind.DECODE: 0, SearchKind.LINK: 1}
    assert waiting.drain() == [items[SearchKind.LINK]] and not len(waiting)
    assert waiting.next_deadline_ms() == NEVER_MS, "who waits no longer has none"


def test_oldest_arrival_includes_late_searches() -> None:
    waiting = SearchQueues()
    assert waiting.oldest_ms() == (NEVER_MS, NEVER_MS)
    late, decode = search("late", arrived_ms=3), search("d", SearchKind.DECODE, arrived_ms=2)
    for item in (late, decode):
        waiting.add(item)
    waiting.prefill.pop(late)
    waiting.late.append(late)
    assert waiting.oldest_ms() == (3, 2)
    waiting.cancel(decode)
    assert waiting.oldest_ms() == (3, 3)

"""Which texts are embedded next."""

from workers.embed.scheduler import STREAK_MAX, EmbedItem, EmbedJob, EmbedScheduler, Urgency


def job(name: str, urgency: Urgency, *tokens: int) -> EmbedJob:
    return EmbedJob([f"{name}{number}" for number in range(len(tokens))], tokens, urgency)


def texts(batch: list[EmbedItem]) -> list[str]:
    return [str(item.text) for item in batch]


def test_queries_go_before_calls_and_calls_before_documents() -> None:
    scheduler = EmbedScheduler(100)
    scheduler.add(job("d", Urgency.DOCUMENT, 10))
    scheduler.add(job("c", Urgency.CALL, 10))
    scheduler.add(job("q", Urgency.QUERY, 10))
    scheduler.add(job("r", Urgency.QUERY, 10))
    assert scheduler.waiting == 4
    assert [texts(scheduler.batch()) for _ in range(4)] == [["q0", "r0"], ["c0"], ["d0"], []]
    assert scheduler.waiting == 0


def test_a_batch_is_bounded_in_tokens_and_has_one_text_at_least() -> None:
    scheduler = EmbedScheduler(100)
    scheduler.add(job("a", Urgency.DOCUMENT, 60, 40, 1, 300, 5))
    batches = [texts(scheduler.batch()) for _ in range(4)]
    assert batches == [["a0", "a1"], ["a2"], ["a3"], ["a4"]]


def test_documents_go_on_under_many_queries() -> None:
    scheduler = EmbedScheduler(10)
    scheduler.add(job("d", Urgency.DOCUMENT, *[10] * 3))
    scheduler.add(job("q", Urgency.QUERY, *[10] * 20))
    order = "".join(texts(scheduler.batch())[0][0] for _ in range(15))
    assert order == ("q" * STREAK_MAX + "d") * 3


def test_nobody_embeds_what_nobody_waits_for() -> None:
    scheduler = EmbedScheduler(100)
    gone, left = job("g", Urgency.QUERY, 10, 10), job("l", Urgency.QUERY, 10)
    scheduler.add(gone)
    scheduler.add(left)
    gone.dropped = True
    assert texts(scheduler.batch()) == ["l0"]
    gone = job("g", Urgency.QUERY, 10)
    scheduler.add(gone)
    gone.dropped = True
    assert scheduler.batch() == []


def test_tenants_take_turns() -> None:
    """One tenant's thousand texts are in front of another's one (found 28)."""
    scheduler = EmbedScheduler(30)
    many = EmbedJob([f"b{number}" for number in range(1_000)], [10] * 1_000, Urgency.CALL, "bob")
    scheduler.add(many)
    assert texts(scheduler.batch()) == ["b0", "b1", "b2"]
    scheduler.add(EmbedJob(["a0", "a1"], [10, 10], Urgency.CALL, "alice"))
    assert texts(scheduler.batch()) == ["b3", "a0", "b4"]
    assert texts(scheduler.batch()) == ["a1", "b5", "b6"]
    many.dropped = True
    scheduler.add(EmbedJob(["c0"], [10], Urgency.CALL, "carol"))
    assert texts(scheduler.batch()) == ["c0"] and scheduler.waiting == 0

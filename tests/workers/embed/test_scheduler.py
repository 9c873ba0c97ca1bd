"""Which texts are embedded next."""

from workers.embed.scheduler import STREAK_MAX, EmbedItem, EmbedJob, EmbedScheduler, Urgency


def job(name: str, urgency: Urgency, *tokens: int) -> EmbedJob:
    return EmbedJob([f"{name}{number}" for number in range(len(tokens))], tokens, urgency)


def texts(batch: list[EmbedItem]) -> list[str]:
    return [str(item.text) for item in batch]


def test_embed_scheduler_orders_by_urgency() -> None:
    scheduler = EmbedScheduler(100)
    scheduler.add(job("d", Urgency.DOCUMENT, 10))
    scheduler.add(job("c", Urgency.CALL, 10))
    scheduler.add(job("q", Urgency.QUERY, 10))
    scheduler.add(job("r", Urgency.QUERY, 10))
    assert scheduler.waiting == 4
    assert [texts(scheduler.batch()) for _ in range(4)] == [["q0", "r0"], ["c0"], ["d0"], []]
    assert scheduler.waiting == 0


def test_embed_scheduler_limits_tokens_of_batch() -> None:
    scheduler = EmbedScheduler(100)
    scheduler.add(job("a", Urgency.DOCUMENT, 60, 40, 1, 300, 5))
    batches = [texts(scheduler.batch()) for _ in range(4)]
    assert batches == [["a0", "a1"], ["a2"], ["a3"], ["a4"]]


def test_embed_scheduler_serves_documents_among_many_queries() -> None:
    scheduler = EmbedScheduler(10)
    scheduler.add(job("d", Urgency.DOCUMENT, *[10] * 3))
    scheduler.add(job("q", Urgency.QUERY, *[10] * 20))
    order = "".join(texts(scheduler.batch())[0][0] for _ in range(15))
    assert order == ("q" * STREAK_MAX + "d") * 3


def test_embed_scheduler_skips_dropped_jobs() -> None:
    scheduler = EmbedScheduler(100)
    dropped_job, waiting_job = job("g", Urgency.QUERY, 10, 10), job("l", Urgency.QUERY, 10)
    scheduler.add(dropped_job)
    scheduler.add(waiting_job)
    dropped_job.dropped = True
    assert texts(scheduler.batch()) == ["l0"]
    dropped_job = job("g", Urgency.QUERY, 10)
    scheduler.add(dropped_job)
    dropped_job.dropped = True
    assert scheduler.batch() == []


def test_embed_scheduler_alternates_between_tenants() -> None:
    """A tenant's thousand texts do not delay another tenant's single one."""
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

"""Searches in the background: what is asked, what comes of it, and that nothing waits for it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.errors import DeadlineExceeded, LeaseError, UnknownCollection
from schemas.records import Insert, Passage, Quoted, Retrieved
from schemas.rules.sizes import HISTORY_BYTES_MAX, PASSAGE_BYTES_MAX, QUOTED_MAX, check_size
from streams.agents import retrieval as agent
from streams.agents.retrieval import Retriever
from streams.core.effects import StartRetrieval
from streams.core.events import CancellationArrived, RequestArrived
from streams.core.requests.context import SessionHistories
from streams.log.retrieval.client import TRY_AGAIN_S
from streams.log.retrieval.results import Hit, RetrievalResult
from tests.streams import builders
from tests.streams.agents.fakes import CODEC, LOG, FakeEvent, router_with_partition
from tests.streams.builders import passage
from tests.virtual_time import run_virtual
from tests.waits import run, until

QUOTED = (Quoted(document_id="d8", content="x"), Quoted(document_id="d9", content="y"))
HISTORY = (
    Insert(at=1, tokens=b"abcd", quoted=QUOTED[:1]),
    Insert(at=2, tokens=b"abcd", quoted=QUOTED),
)


class FakeMembership:
    """Leases what it is asked for, unless all is taken."""

    member_id = "router-a"

    def __init__(self) -> None:
        self.leases: dict[str, int] = {}
        self.refuses = 0

    async def lease(self, topic: str) -> int:
        if self.refuses:
            self.refuses -= 1
            raise LeaseError("all partitions are leased")
        self.leases[topic] = 7
        return 7


class FakeAsker:
    """Finds what the test says."""

    queries: list[tuple[str, dict[str, Any]]]
    find: Callable[[], RetrievalResult]
    breaks: list[Exception]

    def __init__(self, *_: Any) -> None:
        self.running = asyncio.Event()

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.running.clear()

    async def run(self) -> None:
        self.running.set()
        if self.breaks:
            raise self.breaks.pop()
        await asyncio.Event().wait()

    async def search_text(self, text: str, **wishes: Any) -> RetrievalResult:
        self.queries.append((text, wishes))
        await asyncio.sleep(0)
        return type(self).find()


def search_result(*passages: Passage, **changes: Any) -> RetrievalResult:
    hits = tuple(Hit(hit_passage.passage_id, 0.5, passage=hit_passage) for hit_passage in passages)
    base = RetrievalResult(
        retrieval_id="x", hits=hits, shards=3, missing={}, exact=True, seeds=(), extends=4,
        distances_computed=500, took_ms=6.5, wait_ms=1.5, embedded_ms=2.5, mode="hybrid",
    )  # fmt: skip
    return replace(base, **changes)


def ask(request_id: str = "r1", **changes: Any) -> StartRetrieval:
    retrieval = builders.retrieval(77_000, filter="{}", min_score=0.3, **changes)
    request = builders.request(request_id, retrieval=retrieval, tenant="acme")
    return StartRetrieval(request, HISTORY, 3)


class Searching:
    """A retriever with what it has answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, asks_max: int = 8) -> None:
        monkeypatch.setattr(agent, "RetrievalClient", FakeAsker)
        FakeAsker.queries, FakeAsker.breaks, FakeAsker.find = (
            [],
            [],
            lambda: search_result(passage(1)),
        )
        self.membership = FakeMembership()
        self.answers: list[tuple[Retrieved, int]] = []
        self.retriever = Retriever(
            LOG, CODEC, None, self.membership,  # type: ignore[arg-type]  # fakes
            asks_max=asks_max, answer=lambda retrieved, at: self.answers.append((retrieved, at)),
        )  # fmt: skip
        self.life: asyncio.Task[None] | None = None

    async def leased(self) -> "Searching":
        self.life = asyncio.create_task(self.retriever.run())
        await until(lambda: self.retriever._leased.client is not None)
        return self

    async def answered(self, count: int = 1) -> Retrieved:
        await until(lambda: len(self.answers) >= count)
        return self.answers[-1][0]

    async def stop(self) -> None:
        if self.life is not None:
            self.life.cancel()
        await self.retriever.stop()


def test_retriever_searches_with_request_wishes_and_reports_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The query has text, tenant and deadline; the report has passages and times."""

    async def main() -> None:
        on = await Searching(monkeypatch).leased()
        FakeAsker.find = lambda: search_result(
            passage(1),
            passage(2),
            missing={2: DeadlineExceeded("").to_wire()},
            degraded="why",
            changed=frozenset(["d9", "d8"]),
        )
        on.retriever.ask(ask())
        retrieved = await on.answered()
        assert on.answers[0][1] == 3 and on.membership.leases == {"hits": 7}
        ((text, wishes),) = FakeAsker.queries
        assert text == "when does the ferry leave"
        assert wishes == {
            "collection": "handbook", "k": 2, "deadline_ms": 77_000, "mode": "hybrid",
            "filter": "{}", "min_score": 0.3, "tenant": "acme", "request_id": "r1",
            "quoted": QUOTED,
        }  # fmt: skip
        assert retrieved.passages == (passage(1), passage(2)) and retrieved.error is None
        assert (retrieved.request_id, retrieved.session_id, retrieved.router_id) == (
            "r1",
            "s-r1",
            "router-a",
        )
        assert (retrieved.shards, retrieved.missing, retrieved.extends) == (3, (2,), 4)
        assert (retrieved.distances_computed, retrieved.embedded_ms) == (500, 2.5)
        assert (retrieved.wait_ms, retrieved.took_ms, retrieved.mode) == (1.5, 6.5, "hybrid")
        assert retrieved.degraded == "why" and retrieved.history == HISTORY
        assert retrieved.changed == ("d8", "d9")
        await on.stop()

    run(main())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeadlineExceeded("none of 3 shards answered"), "deadline_exceeded"),
        (UnknownCollection("handbook: no such collection"), "collection_not_found"),
        (KeyError("a bug"), "internal_error"),
    ],
)
def test_retriever_reports_error_of_failed_search(
    error: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> RetrievalResult:
        raise error

    async def main() -> None:
        on = await Searching(monkeypatch).leased()
        FakeAsker.find = fail
        on.retriever.ask(ask())
        retrieved = await on.answered()
        assert retrieved.error is not None and retrieved.error.code == code
        assert not retrieved.passages and retrieved.history == HISTORY
        await on.stop()

    run(main())


def test_retriever_without_lease_reports_not_ready_and_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        on, loop = Searching(monkeypatch), asyncio.get_running_loop()
        on.membership.refuses = 2
        began_s = loop.time()
        on.life = asyncio.create_task(on.retriever.run())
        await until(lambda: on.membership.refuses < 2)
        on.retriever.ask(ask())
        retrieved = await on.answered()
        assert (
            retrieved.error is not None
            and retrieved.error.code == "not_ready"
            and not FakeAsker.queries
        )
        await until(lambda: on.retriever._leased.client is not None)
        assert loop.time() - began_s >= 2 * TRY_AGAIN_S
        on.retriever.ask(ask("r2"))
        assert (await on.answered(2)).error is None
        await on.stop()

    run_virtual(main())


@pytest.mark.parametrize("error", [OSError("the log is away"), AssertionError("a bug")])
def test_retriever_survives_failure_of_its_client(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        on = Searching(monkeypatch)
        FakeAsker.breaks.append(error)
        await on.leased()
        on.retriever.ask(ask())
        assert (await on.answered()).error is None
        assert on.life is not None and not on.life.done()
        await on.stop()

    run_virtual(main())


def test_retriever_rejects_search_over_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        on = await Searching(monkeypatch, asks_max=2).leased()
        for number in range(3):
            on.retriever.ask(ask(f"r{number}"))
        retrieved = await on.answered()
        assert (
            retrieved.request_id == "r2"
            and retrieved.error
            and retrieved.error.code == "queue_full"
        )
        await on.answered(3)
        on.retriever.ask(ask("r3"))
        assert (await on.answered(4)).error is None
        await on.stop()

    run(main())


def choices(count: int, **changes: Any) -> list[StartRetrieval]:
    """Of one call."""
    asks = [ask(f"c-{number}") for number in range(count)]
    return [
        replace(start, request=replace(start.request, **{"parent_id": "c", **changes}))
        for start in asks
    ]


def test_retriever_searches_once_for_all_choices_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice has a record of its own; the next call is searched for again."""

    async def main() -> None:
        on = await Searching(monkeypatch).leased()
        for start in choices(4):
            on.retriever.ask(start)
        await on.answered(4)
        assert len(FakeAsker.queries) == 1
        records = [retrieved for retrieved, _ in on.answers]
        assert [record.request_id for record in records] == ["c-0", "c-1", "c-2", "c-3"]
        assert [record.session_id for record in records] == ["s-c-0", "s-c-1", "s-c-2", "s-c-3"]
        assert {record.passages for record in records} == {
            (passage(1),)
        } and not on.retriever._searches
        on.retriever.ask(choices(1)[0])
        await on.answered(5)
        assert len(FakeAsker.queries) == 2
        await on.stop()

    run(main())


@pytest.mark.parametrize("what", ["call", "tenant", "question"])
def test_retriever_searches_separately_where_requests_differ(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history that quotes other documents differs, too."""

    async def main() -> None:
        on = await Searching(monkeypatch).leased()
        (first,) = choices(1)
        assert first.request.retrieval is not None
        changes: dict[str, Any] = {
            "call": {"parent_id": "d"},
            "tenant": {"tenant": "other"},
            "question": {"retrieval": replace(first.request.retrieval, query="another")},
        }
        (second,) = choices(1, **changes[what])
        for start in (first, second, replace(first, history=HISTORY[:1])):
            on.retriever.ask(start)
        await on.answered(3)
        assert len(FakeAsker.queries) == 3
        await on.stop()

    run(main())


def test_shared_search_failure_reaches_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> RetrievalResult:
        raise DeadlineExceeded("nobody answered")

    async def main() -> None:
        on = await Searching(monkeypatch).leased()
        FakeAsker.find = fail
        for start in choices(3):
            on.retriever.ask(start)
        await on.answered(3)
        codes = [retrieved.error and retrieved.error.code for retrieved, _ in on.answers]
        assert codes == ["deadline_exceeded"] * 3 and len(FakeAsker.queries) == 1
        await on.stop()

    run(main())


def test_shared_search_continues_after_first_choice_is_cancelled() -> None:
    """The search began for the first choice of the call."""

    async def main() -> None:
        partitions, producer = await router_with_partition()
        process = partitions.process
        search = asyncio.get_running_loop().create_future()

        class Waiting:
            async def search_text(self, *_: Any, **__: Any) -> RetrievalResult:
                return await search  # type: ignore[no-any-return]

        process.retriever._leased.client = Waiting()  # type: ignore[assignment]
        task = asyncio.create_task(process.outbox.run())
        retrieval = builders.retrieval(process._now_ms + 60_000)
        for name in ("c-0", "c-1"):
            request = builders.request(
                name, retrieval=retrieval, deadline_ms=1 << 60, parent_id="c", session_id="s"
            )
            effects = process.apply(RequestArrived(request, 0), "requests", 0, 0)
            process.outbox.put(effects)
        await until(lambda: len(process.retriever._asks) == 2)
        cancellation = builders.cancellation("c-0")
        process.outbox.put(
            process.apply(CancellationArrived(cancellation, 0), "cancellations", 0, 0)
        )
        search.set_result(search_result(passage(1)))
        await until(lambda: any(topic == "phases" for topic, *_ in producer.sends))
        await process.outbox.drain()
        written = [record for topic, record, *_ in producer.sends if topic == "phases"]
        assert [record.request_id for record in written] == ["c-1"]
        assert written[0].passages == (passage(1),)
        task.cancel()

    run(main())


def test_retriever_gives_up_searches_on_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        on = await Searching(monkeypatch).leased()
        on.retriever.ask(ask())
        await on.stop()
        assert not on.answers

    run(main())


def test_retriever_trims_passages_to_fit_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passages are long, and earlier turns have put in as much as they may."""

    async def main() -> None:
        on = await Searching(monkeypatch).leased()
        long = [passage(n, 10_000, text="é" * 40_000) for n in range(1, 20)]
        quoted = tuple(Quoted(document_id=f"{n:0100}", content="") for n in range(QUOTED_MAX))
        changed = frozenset(quote.document_id for quote in quoted)
        FakeAsker.find = lambda: search_result(*long, changed=changed)
        names_bytes = QUOTED_MAX * (2 * 100 + 16)
        tokens = bytes(HISTORY_BYTES_MAX - names_bytes)
        request, full_history = ask().request, (Insert(at=0, tokens=tokens, quoted=quoted),)
        memory = SessionHistories(sessions_max=1, bytes_max=1 << 30)
        memory.remember(request, full_history, 0)
        assert len(memory) == 1, "no more would be remembered"
        on.retriever.ask(replace(ask(), history=full_history))
        retrieved = await on.answered()
        assert 0 < len(retrieved.passages) < 10
        assert retrieved.passages == tuple(long[: len(retrieved.passages)])
        size = len(Codec().encode(retrieved))
        assert size > PASSAGE_BYTES_MAX - 200_000
        check_size(retrieved, size)
        await on.stop()

    run(main())


# In the process


def test_router_writes_retrieved_record_while_request_lives() -> None:
    """The outbox writes it durably; nothing is written where the request has ended."""

    async def main() -> None:
        partitions, producer = await router_with_partition()
        process = partitions.process
        retrieval = builders.retrieval(process._now_ms + 60_000)
        request = builders.request("r1", retrieval=retrieval, deadline_ms=1 << 60)
        effects = process.apply(RequestArrived(request, 0), "requests", 0, 0)
        assert isinstance(effects[0], StartRetrieval)
        task = asyncio.create_task(process.outbox.run())
        process.outbox.put(effects)
        await until(lambda: bool(producer.sends))  # it has no partition of hits
        topic, retrieved, key, partition, _ = producer.sends[0]
        assert (topic, key, partition) == ("phases", "s-r1", 0)
        assert isinstance(retrieved, Retrieved) and retrieved.error is not None
        event = FakeEvent(process.codec.encode(retrieved))
        await partitions.process.take("phases", event)
        await until(lambda: len(producer.sends) > 1)
        assert producer.sends[1][0] == "tokens" and producer.sends[1][1].retrieved
        process._answer(replace(retrieved, request_id="nobody"), 0)
        await process.outbox.drain()
        assert [topic for topic, *_ in producer.sends] == ["phases", "tokens"]
        task.cancel()

    run(main())

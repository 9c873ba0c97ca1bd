"""The router process on a real broker, with a fleet that the test plays."""

from dataclasses import replace
from typing import Any

import pytest

from schemas import prefix
from schemas.records import (
    Decision,
    DecisionKind,
    KvEvents,
    Outcome,
    OutcomeKind,
    PhaseKind,
    Role,
    Session,
    TokenFrame,
    Work,
    WorkPhase,
)
from schemas.settings import LogSettings
from streams.agents.app import TOPICS
from streams.log.clock import wall_ms
from tests.streams import builders
from tests.streams.agents.stage import applied, fresh, of, router, stage, worker
from tests.waits import run

pytestmark = pytest.mark.kafka


def test_router_serves_remote_request_from_arrival_to_session(kafka: LogSettings) -> None:
    async def main() -> None:
        async with (
            stage(kafka) as on,
            worker(on, "prefill-a", Role.PREFILL, 4),
            worker(on, "decode-a", Role.DECODE, 4),
            router(kafka),
        ):
            request = fresh("r1")
            await on.send("requests", request, request.session_id)
            (prefill,) = await on.until("prefill", of("r1", Work))
            assert prefill.phase is WorkPhase.PREFILL
            prefill_done = builders.phase(prefill, PhaseKind.PREFILL_DONE, wall_ms())
            await on.send("phases", prefill_done, request.session_id)
            (decode,) = await on.until("decode", of("r1", Work))
            assert decode.kv == prefill_done.kv
            assert (decode.first_seq, decode.first_char) == (1, 3)
            outcome = builders.outcome(decode, wall_ms())
            await on.send("outcomes", outcome, request.session_id)
            (session,) = await on.until("sessions", lambda r: isinstance(r, Session))
            assert (session.decode_worker, session.turns) == ("decode-a", 1)
            decisions = await on.until("decisions", of("r1", Decision), 2)
            assert [d.kind for d in decisions] == [DecisionKind.PLACE, DecisionKind.HANDOFF]
            journal = await on.until("journal", applied("outcomes"))
            assert journal[0].router_id == "router-a"

    run(main())


def test_router_applies_kv_events_and_dead_letters_malformed_ones(kafka: LogSettings) -> None:
    async def main() -> None:
        kv_events = KvEvents(
            worker_id="decode-a",
            epoch=1,
            seq=0,
            at_ms=wall_ms(),
            block_size=16,
            snapshot=True,
            stored=prefix.pack(prefix.chain(range(64), 16)),
        )
        async with stage(kafka) as on, worker(on, "replica-a", Role.REPLICA, 4), router(kafka):
            await on.until("journal", applied("ready"))
            for record in (replace(kv_events, stored=b"odd"), kv_events):
                await (await on.producer.send("prefixes", record, key="decode-a", partition=0))
            await on.until("journal", applied("prefixes"))
            (buried,) = await on.until("prefixes.dlq", lambda r: True)
            assert dict(buried.headers)["x-dlq-error-class"] == b"RecordError"

    run(main())


def test_router_dead_letters_garbage_on_every_topic_and_continues(kafka: LogSettings) -> None:
    async def main() -> None:
        async with stage(kafka) as on, worker(on, "replica-a", Role.REPLICA, 4), router(kafka):
            for topic in TOPICS:
                for value in (b"garbage", on.codec.encode(builders.beat("x", 0))):
                    await (
                        await on.producer.send_raw(
                            kafka.topic_prefix + topic, value, key=b"k", partition=0
                        )
                    )
            for topic in TOPICS:
                buried = await on.until(f"{topic}.dlq", lambda r: True, 2)
                headers = dict(buried[0].headers)
                assert headers["x-dlq-error-class"] == b"RecordError"
                assert headers["x-dlq-topic"].decode() == kafka.topic_prefix + topic
            session_id = next(s for s in "abcdef" if on.producer.session_partition(s) == 0)
            await on.send("requests", fresh("r1", session_id=session_id), session_id)
            (work,) = await on.until("decode", of("r1", Work))
            assert work.worker_id == "replica-a"

    run(main())


def test_router_restart_loses_no_requests(kafka: LogSettings) -> None:
    async def main() -> None:
        async with stage(kafka) as on:
            requests = [fresh(f"r{i}") for i in range(6)]
            async with router(kafka), worker(on, "replica-a", Role.REPLICA, 2):
                for request in requests[:4]:
                    await on.send("requests", request, request.session_id)
                await on.until("decode", lambda r: isinstance(r, Work), 2)
            for request in requests[4:]:  # while no router lives
                await on.send("requests", request, request.session_id)
            async with router(kafka), worker(on, "replica-a", Role.REPLICA, 10) as replica:

                def is_its(record: Any) -> bool:
                    return isinstance(record, Work) and record.worker_epoch == replica.epoch

                works = await on.until("decode", is_its, len(requests))
                assert {w.request_id for w in works} == {r.request_id for r in requests}
                assert all(w.attempt > 1 for w in works)  # none shares its number with lost work

    run(main())


def test_router_expires_and_cancels_requests_without_worker(kafka: LogSettings) -> None:
    async def main() -> None:
        async with stage(kafka) as on, router(kafka):
            soon = fresh("r1", deadline_ms=wall_ms() + 300)
            late = fresh("r2")
            await on.send("requests", soon, soon.session_id)
            await on.send("requests", late, late.session_id)
            await on.send("cancellations", builders.cancellation("r2"), late.session_id)
            kinds = {"r1": OutcomeKind.EXPIRED, "r2": OutcomeKind.CANCELLED}
            for request_id, kind in kinds.items():
                (outcome,) = await on.until("outcomes", of(request_id, Outcome))
                assert outcome.kind is kind
            frames = await on.until("tokens", lambda r: isinstance(r, TokenFrame), 2)
            assert {f.ends[0].request_id: f.ends[0].kind for f in frames} == kinds
            (decision,) = await on.until("decisions", of("r1", Decision))
            assert decision.reason.value == "no_worker"

    run(main())


def test_two_routers_place_each_request_once(kafka: LogSettings) -> None:
    async def main() -> None:
        async with (
            stage(kafka) as on,
            worker(on, "replica-a", Role.REPLICA, 50),
            router(kafka, "router-a"),
            router(kafka, "router-b"),
        ):
            number, routers = 0, set[str]()
            while len(routers) < 2:
                request = fresh(f"r{number}")
                request = replace(request, session_id=f"s{number}")
                await on.send("requests", request, request.session_id)
                work, *_ = await on.until("decode", of(request.request_id, Work))
                routers.add(work.router_id)
                await on.send("outcomes", builders.outcome(work, wall_ms()), request.session_id)
                number += 1
            ids = [r.request_id for r in on.read["decode"]]
            assert len(ids) == len(set(ids))  # each was placed once

    run(main())

"""Workers with simulated engines on a real broker; the test is router and gateway."""

import asyncio
from dataclasses import replace

import pytest

from schemas.errors import LeaseError
from schemas.records import (
    MemberState,
    Mode,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Role,
    Sampling,
    TokenFrame,
    WorkPhase,
)
from schemas.settings import LogSettings
from tests.waits import until
from tests.workers.fakes import cancel_work
from tests.workers.on_broker.router import chat, router_of, worker_of

pytestmark = pytest.mark.kafka


@pytest.mark.parametrize("transfer", ["memory", "nixl"])
async def test_prefill_and_decode_match_replica(kafka: LogSettings, transfer: str) -> None:
    if transfer == "nixl":
        pytest.importorskip("nixl", reason="the NIXL library is missing")
    async with (
        router_of(kafka) as router,
        worker_of(router, "p", Role.PREFILL, transfer=transfer),
        worker_of(router, "d", Role.DECODE, transfer=transfer),
        worker_of(router, "r", Role.REPLICA),
    ):
        await router.send("prefill", chat("r1", WorkPhase.PREFILL, **router.address("p")), "p")
        await until(lambda: router.of(Phase, "r1") != [])
        (prefill_phase,) = router.of(Phase, "r1")
        assert (prefill_phase.kind, prefill_phase.sent_tokens, prefill_phase.kv.worker_id) == (
            PhaseKind.PREFILL_DONE,
            1,
            "p",
        )
        assert prefill_phase.kv.params == b""  # the peer finds the metadata in the fleet
        assert prefill_phase.kv.worker_epoch == router.membership.view.members["p"].epoch
        handover = {
            "first_seq": prefill_phase.sent_tokens,
            "first_char": prefill_phase.sent_chars,
            "kv": prefill_phase.kv,
        }
        order = chat("r1", WorkPhase.DECODE, prefill_worker="p", **handover, **router.address("d"))
        await router.send("decode", order, "d")
        order = chat("r2", WorkPhase.DECODE, mode=Mode.REPLICA, **router.address("r"))
        await router.send("decode", order, "r")
        await until(lambda: len(router.of(Outcome)) == 2)
        await until(lambda: len(router.of(Phase, "r1")) == 2)  # topics are read side by side
        received = router.of(Phase, "r1")[1]
        assert (received.kind, received.worker_id) == (PhaseKind.KV_RECEIVED, "d")
        assert received.kv_bytes > 0
        (outcome,) = router.of(Outcome, "r1")
        assert (outcome.kind, outcome.prefill_worker, outcome.decode_worker) == (
            OutcomeKind.COMPLETED,
            "p",
            "d",
        )
        assert (outcome.completion_tokens, outcome.kv_bytes) == (12, received.kv_bytes)
        await until(lambda: sum(len(f.ends) for f in router.of(TokenFrame)) == 2)
        assert router.answer("r1") == router.answer("r2")
        assert len(router.answer("r1")[0]) == 12


async def test_worker_handles_rubbish_cancellation_and_drain(
    kafka: LogSettings,
) -> None:
    async with (
        router_of(kafka) as router,
        worker_of(router, "d", Role.REPLICA, decode_step_ms=50) as (task, stop),
    ):
        (lease,) = router.membership.view.members["d"].registration.leases
        topic = kafka.topic_prefix + "decode"
        await router.producer.send_raw(topic, b"rubbish", key=b"k", partition=lease.partition)
        long = {"sampling": Sampling(max_tokens=1_900, seed=3, ignore_eos=True)}
        order = chat("r1", WorkPhase.DECODE, **long, **router.address("d"))
        await router.send("decode", order, "d")
        await router.send("decode", chat("r2", WorkPhase.DECODE, **router.address("d")), "d")
        await until(lambda: router.answer("r1")[0] != [] and router.answer("r2")[0] != [])
        await until(lambda: router.dead_letters == [b"rubbish"])
        await router.send("decode", cancel_work("r1", worker_id="d"), "d")
        await until(lambda: router.of(Outcome, "r1") != [])
        assert router.of(Outcome, "r1")[0].kind is OutcomeKind.CANCELLED
        stop.set()
        await asyncio.wait([task])
        assert task.exception() is None
        await until(lambda: router.state("d") is MemberState.GONE)
        await until(lambda: router.of(Outcome, "r2") != [])
        assert router.of(Outcome, "r2")[0].kind is OutcomeKind.COMPLETED


async def test_worker_ends_when_later_epoch_takes_name(kafka: LogSettings) -> None:
    async with (
        router_of(kafka) as router,
        worker_of(router, "d", Role.REPLICA) as (task, _),
    ):
        member = router.membership.view.members["d"]
        later = replace(member.registration, epoch=member.epoch + 1)
        await (await router.producer.send("fleet", later, key="d", partition=0))
        await asyncio.wait([task])
        assert isinstance(task.exception(), LeaseError)

"""Whom the gateway's connection to the log believes to live, and what it refuses calls with."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NotEnoughReplicasError,
    TopicAuthorizationFailedError,
)

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, NotReady, RecordTooLarge
from schemas.fleet import LEASE_MS, FleetView
from schemas.records import MemberKind, MemberState, Role
from schemas.settings import LogSettings
from streams.calls.config import GatewaySettings
from streams.calls.log import member
from streams.calls.process import CallProcess
from streams.calls.request.served import ModelCard, ServedModel, ServedModels
from tests.streams import builders
from tests.streams.builders import T0
from tests.streams.gateway.small_tokenizer import tokenizer

CARD = ModelCard(name="tiny", model="tiny", max_model_len=64, created_s=1)


def connection(*other_cards: ModelCard) -> CallProcess:
    """The product's connection to the log, which no broker is asked for."""
    models = ServedModels(ServedModel(CARD, tokenizer()), other_cards)
    return CallProcess.build(
        *(LogSettings(), Codec(), GatewaySettings(), models), process_id="gateway-a"
    )


def joined(view: FleetView, *other_cards: ModelCard, leader: bool = True) -> CallProcess:
    """A process that is a member with this view; its heartbeats are acknowledged where the topic
    has a leader."""
    process = connection(*other_cards)
    membership: Any = SimpleNamespace(
        view=view,
        leases={"tokens": 1},
        is_valid=lambda: leader,
        waits_for_leader=lambda: not leader,
    )
    process.member._membership, process.tokens._positions = membership, {1: 7}
    return process


@pytest.mark.parametrize(("role", "serves"), [(Role.DECODE, True), (Role.PREFILL, False)])
async def test_member_is_ready_with_decode_worker_alone(
    role: Role, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker computes prompts itself until a prefill worker joins."""
    view = FleetView()
    view.apply(builders.registration("w", role, capability=builders.capability("w")), 0, T0)
    view.apply(builders.beat("w", 1), 1, T0)
    view.apply(builders.registration("gateway-a", kind=MemberKind.GATEWAY), 2, T0)
    monkeypatch.setattr(member, "wall_ms", lambda: T0)
    none = ["no decode worker is ready, nor a replica"]
    assert joined(view).member.problems() == ["no router is alive", *none[serves:]]


async def test_member_knows_which_models_and_adapters_have_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that has no adapter serves none; nor does one that only computes prompts."""
    view, able = FleetView(), builders.capability("w")
    workers = (
        ("w", Role.DECODE, replace(able, adapters=("law",))),
        ("p", Role.PREFILL, replace(able, model="big")),
    )
    for number, (name, role, capability) in enumerate(workers):
        view.apply(builders.registration(name, role, capability=capability), number, T0)
        view.apply(builders.beat(name, 1), number, T0)
    view.apply(builders.registration("gateway-a", kind=MemberKind.GATEWAY), 2, T0)
    view.apply(builders.registration("router", kind=MemberKind.ROUTER), 3, T0)
    view.apply(builders.beat("router", 1), 3, T0)
    monkeypatch.setattr(member, "wall_ms", lambda: T0)
    other_cards = [replace(CARD, name="big", model="big"), replace(CARD, name="law", adapter="law")]
    log = joined(view, *other_cards).member
    assert log.reply_position() == log.reply_position("tiny") == log.reply_position("tiny", "law")
    for names, missing in ((("big",), "big"), (("tiny", "art"), "art")):
        with pytest.raises(NotReady, match=f"no worker serves the model '{missing}' at the moment"):
            log.reply_position(*names)
    assert log.problems() == []
    assert log.unserved() == ["model 'big': no decode worker is ready, nor a replica"]
    view.apply(builders.beat("w", 2, state=MemberState.DRAINING), 4, T0)
    assert log.problems() == ["no decode worker is ready, nor a replica"]
    assert log.unserved() == [], "nothing is served"
    with pytest.raises(NotReady, match="no worker serves"):
        log.reply_position()


async def test_member_counts_silent_workers_as_servers() -> None:
    """Members that left are dropped, and workers of another model never count."""
    view, able = FleetView(), builders.capability("w")
    for number, name in enumerate(("lives", "silent", "gone", "other")):
        model = "huge" if name == "other" else able.model
        record = builders.registration(name, Role.DECODE, capability=replace(able, model=model))
        view.apply(record, number, T0)
    view.apply(builders.registration("router", kind=MemberKind.ROUTER), 4, T0)
    view.apply(builders.registration("beside", kind=MemberKind.GATEWAY), 4, T0)
    view.apply(builders.beat("lives", 1), 4, T0 + 10 * LEASE_MS)
    view.apply(builders.beat("gone", 1, state=MemberState.GONE), 5, T0)
    member_ids = [worker.member_id for worker in joined(view).member.servers("tiny")]
    assert member_ids == ["lives", "silent", "router"]
    assert connection().member.servers("tiny") == [], "it is no member yet"


async def test_member_ignores_silence_of_workers_while_log_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Just after the log falls silent, the broker is away and not the workers."""
    view, now_ms = FleetView(), T0 + 400
    capability = builders.capability("replica-a")
    view.apply(builders.registration("replica-a", Role.REPLICA, capability=capability), 0, T0)
    view.apply(builders.beat("replica-a", 1), 1, T0)
    itself = builders.registration("gateway-a", kind=MemberKind.GATEWAY)
    view.apply(itself, 2, now_ms)
    log = joined(view).member
    for later_ms in (0, LEASE_MS):
        monkeypatch.setattr(member, "wall_ms", lambda later_ms=later_ms: now_ms + later_ms)
        assert log.reply_position() == (1, 7)
        assert log.problems() == ["no router is alive"]
    monkeypatch.setattr(member, "wall_ms", lambda: now_ms + LEASE_MS + 1)
    with pytest.raises(BrokerUnavailable, match="nothing of the log is heard"):
        log.reply_position()
    assert log.problems() == ["nothing of the log is heard; is the broker away?"]
    view.apply(builders.beat("gateway-a", 1), 3, now_ms + LEASE_MS)
    with pytest.raises(NotReady, match="no worker serves the model"):
        log.reply_position()


async def test_member_accepts_calls_during_leader_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No heartbeat is acknowledged or read for longer than a lease."""
    view = FleetView()
    capability = builders.capability("replica-a")
    view.apply(builders.registration("replica-a", Role.REPLICA, capability=capability), 0, T0)
    view.apply(builders.beat("replica-a", 1), 1, T0)
    view.apply(builders.registration("gateway-a", kind=MemberKind.GATEWAY), 2, T0)
    monkeypatch.setattr(member, "wall_ms", lambda: T0 + 3 * LEASE_MS)
    assert joined(view, leader=False).member.reply_position() == (1, 7)
    with pytest.raises(BrokerUnavailable, match="nothing of the log is heard"):
        joined(view).member.reply_position()


class RefusingProducer:
    """Sends nothing: `errors` say why, one for each record."""

    def __init__(self, *errors: Exception, at_once: bool) -> None:
        self.errors = list(errors)
        self.at_once = at_once

    def session_partition(self, session_id: str) -> int:
        return 0

    async def send(self, topic: str, record: Any, **options: Any) -> asyncio.Future[None]:
        error = self.errors.pop(0)
        if self.at_once:
            raise error
        ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ack.set_exception(error)
        return ack


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("error", "raised", "away"),
    [
        (RecordTooLarge("9 MB"), RecordTooLarge, False),
        (MessageSizeTooLargeError("9 MB"), RecordTooLarge, False),
        (TopicAuthorizationFailedError("no"), BrokerUnavailable, False),
        (KafkaTimeoutError("late"), BrokerUnavailable, True),
        (KafkaConnectionError("gone"), BrokerUnavailable, True),
        (NotEnoughReplicasError("1"), BrokerUnavailable, True),
        (BrokerUnavailable("not started"), BrokerUnavailable, True),
    ],
)
async def test_only_absent_broker_makes_member_refuse_other_calls(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type, away: bool, at_once: bool
) -> None:
    """One oversized request must not make the gateway answer 503 to all."""
    view = FleetView()
    view.apply(builders.registration("replica-a", Role.REPLICA), 0, T0)
    view.apply(builders.registration("gateway-a", kind=MemberKind.GATEWAY), 1, T0)
    monkeypatch.setattr(member, "wall_ms", lambda: T0)
    log = joined(view)
    log.sender._started = RefusingProducer(error, at_once=at_once)  # type: ignore[assignment]  # a fake
    with pytest.raises(raised):
        await log.sender.send(builders.request("r1"))
    expected = BrokerUnavailable if away else NotReady  # no worker has told its model
    with pytest.raises(expected):
        log.member.reply_position()

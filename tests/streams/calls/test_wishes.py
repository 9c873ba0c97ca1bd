"""A wish that a deployment cannot meet is refused: its name, why, and what is possible instead."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.fleet import Member
from schemas.records import MemberKind, Orchestration, Role
from streams.config import POLICIES
from tests.streams import builders
from tests.streams.builders import ALL, T0
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, chat

P, D, C = Orchestration.PREFILL_FIRST, Orchestration.DECODE_FIRST, Orchestration.CONCURRENT
PREFILL, DECODE, REPLICA = Role.PREFILL, Role.DECODE, Role.REPLICA
POLICY, ORDER = "x-trivium-policy", "x-trivium-orchestration"
Fleet = list[tuple[tuple[Role, ...], dict[str, Any]]]


def worker(*roles: Role, **changes: Any) -> tuple[tuple[Role, ...], dict[str, Any]]:
    return roles, {"orchestrations": ALL, **changes}


def gateway_of(*workers: tuple[tuple[Role, ...], dict[str, Any]]) -> InProcessGateway:
    """A gateway that has heard of these workers, and of nobody else."""
    gateway = InProcessGateway(max_model_len=4_096)  # so that probes have room
    gateway.answer_with("ok")
    for number, (roles, changes) in enumerate(workers):
        able = replace(builders.capability(str(number)), **changes)
        record = builders.registration(f"w{number}", *roles, capability=able)
        gateway.log.members.append(Member(record, T0))
    return gateway


VLLM = [worker(role, engine="vllm", orchestrations=[P, C]) for role in (PREFILL, DECODE)]
UNLIKE = [worker(PREFILL, kv_layout="a"), worker(DECODE, kv_layout="b")]
BOTH = [worker(PREFILL, DECODE)]
REPLICAS = [worker(REPLICA), worker(REPLICA)]
PAIR = [worker(PREFILL), worker(DECODE)]


@pytest.mark.parametrize(
    ("workers", "header", "wish", "possible", "why"),
    [
        (VLLM, ORDER, D, "auto, prefill_first, concurrent", "no two workers of engine vllm can"),
        (UNLIKE, ORDER, C, "auto, prefill_first", "can exchange KV"),
        (BOTH, ORDER, D, "auto, prefill_first", "no two workers of engine sim can"),
        (REPLICAS, ORDER, P, "auto", "there is none for prefill"),
        ([worker(DECODE)], ORDER, P, "auto", "there is none for prefill"),
        (REPLICAS, POLICY, "static", "round_robin, replica", "static needs a worker for decode"),
        (REPLICAS, POLICY, "pairs", "round_robin, replica", "a worker for prefill and decode"),
        (
            *(PAIR, POLICY, "replica"),
            ", ".join(name for name in POLICIES if name != "replica"),
            "replica needs a worker for replica",
        ),
    ],
)
async def test_gateway_rejects_wish_that_no_worker_can_meet(
    workers: Fleet, header: str, wish: str, possible: str, why: str
) -> None:
    """The wish is never replaced silently, and no request is written."""
    gateway = gateway_of(*workers)
    field = header.removeprefix("x-trivium-")
    for headers, body, param in (
        ({header: wish}, chat(), header),
        ({}, chat(trivium={field: wish}), f"trivium.{field}"),
    ):
        status, answer = await call(gateway, body, **headers)
        error = answer["error"]
        assert (status, error["param"]) == (400, param)
        assert f"{param}: this deployment can meet {possible}, found {wish}; " in error["message"]
        assert why in error["message"]
    assert not gateway.log.sent_records


@pytest.mark.parametrize(
    ("workers", "header", "wish"),
    [
        ([], ORDER, D),  # nobody is known: who is to say?
        (PAIR, ORDER, D),
        (PAIR, ORDER, C),
        ([*BOTH, *BOTH], ORDER, D),
        ([*UNLIKE, worker(DECODE, kv_layout="a")], ORDER, C),
        (UNLIKE, ORDER, P),
        (REPLICAS, ORDER, "auto"),
        ([*PAIR, *REPLICAS], POLICY, "replica"),
        (REPLICAS, POLICY, "round_robin"),
        (BOTH, POLICY, "pairs"),
        ([worker(DECODE)], POLICY, "learned"),
    ],
)
async def test_gateway_forwards_wish_that_some_worker_can_meet(
    workers: Fleet, header: str, wish: str
) -> None:
    """Routers decide about workers that are full or dead at the moment."""
    gateway = gateway_of(*workers)
    assert (await call(gateway, chat(), **{header: wish}))[0] == 200
    (request,) = gateway.log.requests
    assert wish in (request.policy, request.orchestration)


async def test_responses_and_completions_reject_unmeetable_wishes() -> None:
    gateway = gateway_of(*VLLM)
    body = {"model": MODEL, "input": "Hi"}
    status, answer = await call(gateway, body, "/v1/responses", **{ORDER: "decode_first"})
    assert (status, answer["error"]["param"]) == (400, ORDER)
    completion_body = {"model": MODEL, "prompt": "Hi", "trivium": {"orchestration": "decode_first"}}
    assert (await call(gateway, completion_body, "/v1/completions"))[0] == 400
    assert not gateway.log.sent_records


async def test_gateway_rejects_policy_that_routers_lack() -> None:
    """`table` needs a table; a router that lists no policies is an older one."""
    gateway = gateway_of(*PAIR)
    names = [("r0", ()), ("r1", ("learned", "static"))]
    for number, (name, policies) in enumerate(names):
        router = builders.registration(name, kind=MemberKind.ROUTER, policies=policies)
        gateway.log.members.append(Member(router, T0))
        status, answer = await call(gateway, chat(), **{POLICY: "table"})
        assert status == (200, 400)[number]
    message = answer["error"]["message"]
    assert "this deployment can meet learned, static, found table; routers have no table" in message
    assert (await call(gateway, chat(), **{POLICY: "static"}))[0] == 200


BUILT_IN = ("every", "sentence", "uncertain")


@pytest.mark.parametrize(
    ("triggers", "wish", "status"),
    [
        ([BUILT_IN, BUILT_IN], "sentence", 200),
        ([(), ()], "sentence", 200),  # workers that do not tell have those three
        ([(), ()], "question", 400),
        ([(*BUILT_IN, "question"), BUILT_IN], "question", 400),
        ([(*BUILT_IN, "question"), (*BUILT_IN, "question")], "question", 200),
        ([BUILT_IN, BUILT_IN], None, 200),
    ],
)
async def test_gateway_rejects_trigger_missing_from_any_decode_worker(
    triggers: list[tuple[str, ...]], wish: str | None, status: int
) -> None:
    """Workers list the triggers that are installed there."""
    roles = zip((DECODE, REPLICA), triggers, strict=True)
    decoders = [worker(role, triggers=names) for role, names in roles]
    gateway = gateway_of(worker(PREFILL, triggers=BUILT_IN), *decoders)
    body = chat(retrieval={"collection": "c", "probes": {"trigger": wish}})
    actual_status, answer = await call(gateway, body)
    assert actual_status == status
    if status == 400:
        error = answer["error"]
        assert error["param"] == "retrieval.probes.trigger"
        assert "can meet every, sentence, uncertain, found question; every" in error["message"]
        assert not gateway.log.sent_records
    else:
        (request,) = gateway.log.requests
        assert request.retrieval is not None and request.retrieval.probing is not None
        assert request.retrieval.probing.trigger == (wish or "every")

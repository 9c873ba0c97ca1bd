"""The gateway process on a real broker, with a scripted worker and a router that only lives."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.broker.node import Broker
from infra.broker.section import BrokerSettings
from schemas.codec import Codec
from schemas.errors import ConfigError, NameTaken
from schemas.records import Capability, MemberKind, MemberState, Request, Role
from schemas.settings import LogSettings, ModelSettings
from streams.calls.config import GatewaySettings
from streams.gateway import app
from streams.gateway.app import run_gateway
from streams.gateway.http.listener import listen
from streams.log.admin import create_topics
from streams.log.clients import AssignedReader, LogProducer
from streams.log.membership import Membership
from tests.long_leases import long_leases
from tests.streams.gateway.in_process import http_client
from tests.streams.gateway.samples import MODEL, chat, events_of, frame, stream_end, text_of
from tests.streams.gateway.small_tokenizer import tokenizer_folder
from tests.streams.gateway.streamed_call import WITH_IDS
from tests.waits import PATIENCE_S, until
from tests.workers.processes import stands_still

pytestmark = pytest.mark.kafka
CAPABILITY = Capability(
    model=MODEL, engine="sim", engine_id="e", block_size=16, max_model_len=256, running_max=8
)
TEXTS = ["Hé", "llo", " wörld"]
LOG = LogSettings(session_partitions=1, gateway_partitions=2, request_timeout_ms=30_000)
LEASE_MS = 6_000  # where it has to run out, once all are there


@dataclass
class Cluster:
    """What the gateways under test talk to, and the gateways."""

    log: LogSettings
    producer: LogProducer
    reader: AssignedReader
    gateways: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = field(default_factory=dict)
    members: list[asyncio.Task[None]] = field(default_factory=list)

    async def gateway(
        self, name: str, *, accept_ms: int = 60_000, log: LogSettings | None = None
    ) -> str:
        """Start one, with a router and a worker of its own; its URL once it is ready."""
        self.start(name, log or self.log, accept_ms=accept_ms)
        with long_leases():
            router = await self.join(f"router-of-{name}", MemberKind.ROUTER)
            await self.join(f"replica-of-{name}", MemberKind.WORKER)

            def sees_ready_gateway() -> bool:
                member = router.view.members.get(name)
                return member is not None and member.state is MemberState.READY

            await until(sees_ready_gateway)
            url = router.view.members[name].registration.url
            async with http_client(url) as client:
                await until(lambda: ready(client))
        return url

    def start(self, name: str, log: LogSettings, **changes: Any) -> None:
        """Start one alone."""
        patient = GatewaySettings(
            grace_ms=60_000, keepalive_ms=600_000, deadline_ms=600_000, event_key="k" * 32
        )
        settings = replace(patient, **{"port": 0, "wait_ms": 100, **changes})
        model = ModelSettings(path=str(tokenizer_folder()), name=MODEL, max_model_len=256)
        stop = asyncio.Event()
        work = run_gateway(log, settings, [model], gateway_id=name, stop=stop)
        self.gateways[name] = stop, asyncio.create_task(work)

    async def join(self, name: str, kind: MemberKind) -> Membership:
        """One more member of the fleet, ready."""
        roles = (Role.REPLICA,) if kind is MemberKind.WORKER else ()
        membership = Membership(
            self.log, Codec(), self.producer, member_id=name, kind=kind, roles=roles
        )
        membership.set_state(MemberState.READY)
        await membership.join(CAPABILITY if roles else None)
        self.members.append(asyncio.create_task(_run(membership)))
        return membership

    async def next_request(self, session_id: str = "") -> Request:
        """The next request that any gateway sends, of this session if one is named."""
        while True:
            for record in await self.reader.batch(max_records=1):
                request = Codec().decode(record.value)
                assert isinstance(request, Request)
                if session_id in ("", request.session_id):
                    return request

    async def answer(self, request: Request, first: int, last: int) -> None:
        """Send the frame of some of its tokens; with the last one its end."""
        end = stream_end(request.request_id, TEXTS) if last == len(TEXTS) else None
        before = len("".join(TEXTS[:first]))
        record = frame(
            request.request_id, TEXTS[first:last], first_seq=first, first_char=before, end=end
        )
        partition = request.gateway_partition
        await (await self.producer.send("tokens", record, key="gateway", partition=partition))

    async def stop(self) -> None:
        """Gateways first, as they should end by themselves."""
        for stop, _ in self.gateways.values():
            stop.set()
        await asyncio.wait_for(
            asyncio.gather(*(task for _, task in self.gateways.values())), PATIENCE_S
        )
        await self.leave()

    async def leave(self) -> None:
        """All but the gateways."""
        for member in self.members:
            member.cancel()
        await asyncio.gather(*self.members, return_exceptions=True)
        await self.reader.stop()
        await self.producer.stop()


async def _run(member: Membership) -> None:
    try:
        await member.run()
    finally:
        await member.leave()


async def ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health/ready")).status_code == 200


@contextlib.asynccontextmanager
async def cluster(kafka: LogSettings, lease_ms: int = 100_000) -> AsyncIterator[Cluster]:
    """Gateways and members whose leases no stall of the machine ends."""
    producer = LogProducer(kafka, Codec(), durable=True, client_id="test")
    reader = AssignedReader(kafka, "requests", range(kafka.session_partitions), client_id="test")
    await producer.start()
    await reader.start("latest")
    cluster = Cluster(kafka, producer, reader)
    with long_leases(lease_ms):
        try:
            yield cluster
        finally:
            await cluster.stop()


async def test_second_gateway_resumes_stream_from_kafka(kafka: LogSettings) -> None:
    async with cluster(kafka) as running:
        urls = [await running.gateway("gateway-1"), await running.gateway("gateway-2")]
        async with http_client("") as client:
            path = "/v1/chat/completions"
            post = client.post(urls[0] + path, json=chat(stream=True), headers=WITH_IDS)
            call = asyncio.create_task(post)
            request = await running.next_request()
            await running.answer(request, 0, 1)
            await running.answer(request, 1, 3)
            await running.answer(request, 1, 3)  # a repeat
            whole = (await call).text
            assert text_of(events_of(whole)) == "".join(TEXTS)
            role, first, *_ = whole.split("\n\n")
            first_id = first.split("\n")[0].removeprefix("id: ")
            resumption = await client.get(
                f"{urls[1]}/v1/requests/{request.request_id}/events",
                headers={"Last-Event-ID": first_id},
            )
            had = text_of(events_of(role + "\n" + first))
            assert had and had + text_of(events_of(resumption.text)) == "".join(TEXTS)


async def test_starting_gateway_queues_calls_until_ready(kafka: LogSettings) -> None:
    """It must not refuse them with 503."""
    async with cluster(kafka) as running:
        running.start("gateway-1", kafka, wait_ms=600_000)
        router = await running.join("router", MemberKind.ROUTER)
        await until(lambda: "gateway-1" in router.view.members)
        url = router.view.members["gateway-1"].registration.url
        async with http_client(url) as client:
            coroutines = [
                client.post("/v1/chat/completions", json=chat()),
                client.get("/health/ready"),
            ]
            call, health = [asyncio.create_task(coroutine) for coroutine in coroutines]
            await until(lambda: ours(router, "gateway-1"))
            assert not call.done() and not health.done()
            await running.join("replica", MemberKind.WORKER)
            await running.answer(await running.next_request(), 0, 3)
            assert ((await call).status_code, (await health).status_code) == (200, 200)


def ours(router: Membership, name: str) -> bool:
    return router.view.members[name].state is MemberState.READY


async def test_gateway_stops_when_another_process_takes_its_name(kafka: LogSettings) -> None:
    """Otherwise routers would take its requests for those of a lost process."""
    async with cluster(kafka) as running:
        await running.gateway("gateway-1")
        _, first = running.gateways.pop("gateway-1")
        await running.join("gateway-1", MemberKind.GATEWAY)
        with pytest.raises(NameTaken, match="another process took its place"):
            await asyncio.wait_for(first, PATIENCE_S)


async def test_gateway_dead_letters_undecodable_frame_and_continues(kafka: LogSettings) -> None:
    async with cluster(kafka) as running:
        url = await running.gateway("gateway-1")
        async with http_client(url) as client:
            call = asyncio.create_task(client.post("/v1/chat/completions", json=chat()))
            request = await running.next_request()
            topic = kafka.topic_prefix + "tokens"
            partition = request.gateway_partition
            await (
                await running.producer.send_raw(topic, b"\xc3\x01x", key=b"k", partition=partition)
            )
            await running.answer(request, 0, 3)
            assert (await call).json()["choices"][0]["message"]["content"] == "".join(TEXTS)
            metrics = (await client.get("/metrics")).text
            assert "trivium_gateway_undecodable_records_total 1.0" in metrics
        dead = AssignedReader(kafka, "tokens.dlq", [0], client_id="test")
        await dead.start("earliest")
        try:
            (record,) = await dead.batch()
        finally:
            await dead.stop()
        assert record.value == b"\xc3\x01x"


async def test_stopping_gateway_finishes_streams_then_leaves_fleet(kafka: LogSettings) -> None:
    async with cluster(kafka) as running:
        url = await running.gateway("gateway-1")
        async with http_client(url) as client:
            path = "/v1/chat/completions"
            call = asyncio.create_task(client.post(path, json=chat(stream=True)))
            request = await running.next_request()
            stop, gateway = running.gateways["gateway-1"]
            stop.set()

            async def draining() -> bool:
                return "shutting down" in (await client.get("/health/ready")).text

            await until(draining)
            assert (await client.post(path, json=chat())).status_code == 503
            await running.answer(request, 0, 3)
            assert text_of(events_of((await call).text)) == "".join(TEXTS)
        await asyncio.wait_for(gateway, PATIENCE_S)


async def test_gateway_serves_503_while_broker_is_absent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It retries until the broker answers."""
    log = LogSettings(bootstrap="127.0.0.1:1")
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    settings = GatewaySettings(port=0, wait_ms=100)
    model = ModelSettings(path=str(tokenizer_folder()), name=MODEL)
    stop = asyncio.Event()
    monkeypatch.setattr(app, "listen", lambda *_: sock)
    task = asyncio.create_task(run_gateway(log, settings, [model], gateway_id="g", stop=stop))
    async with http_client(f"http://127.0.0.1:{port}") as client:

        async def listening() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                return (await client.get("/health/live")).status_code == 200
            return False

        await until(listening)
        refused = await client.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "broker_unavailable"
        assert (await client.get("/health/ready")).status_code == 503
        tries = [record for record in caplog.records if "no broker at" in record.getMessage()]
        await until(lambda: caplog.text.count("no broker at 127.0.0.1:1") > len(tries) + 1)
        assert not task.done()
    stop.set()
    await asyncio.wait_for(task, PATIENCE_S)


async def test_gateway_returns_503_during_broker_pause_and_rejoins(tmp_path: Path) -> None:
    broker = Broker(
        BrokerSettings(port=0, heap_mb=384, quick=True, start_timeout_s=200),
        tmp_path,
        tethered=True,
    )
    try:
        address = broker.start()  # here and not in a thread: the broker ends with its thread
    except ConfigError as error:
        pytest.skip(str(error))
    pid = broker.status().pid
    try:
        log = replace(LOG, bootstrap=address)
        await create_topics(log)
        async with cluster(log, LEASE_MS) as running:
            url = await running.gateway("gateway-1", accept_ms=LEASE_MS + 1_000)
            async with http_client(url) as client:
                os.kill(pid, signal.SIGSTOP)
                await until(lambda: stands_still(pid))
                try:
                    assert await refused(client)  # found out by not being acknowledged
                    assert await refused(client, "cannot be written")  # and known since
                    assert not await ready(client)
                finally:
                    os.kill(pid, signal.SIGCONT)
                await running.join("router-2", MemberKind.ROUTER)
                await running.join("replica-2", MemberKind.WORKER)
                await until(lambda: ready(client))
                headers = {"X-Session-Id": "after"}
                call = asyncio.create_task(
                    client.post("/v1/chat/completions", json=chat(), headers=headers)
                )
                await running.answer(await running.next_request("after"), 0, 3)
                assert (await call).status_code == 200
    finally:
        await asyncio.to_thread(broker.stop)


async def test_gateway_and_streams_survive_broker_restart(tmp_path: Path) -> None:
    settings = BrokerSettings(port=0, heap_mb=384, quick=True, start_timeout_s=200)
    broker = Broker(settings, tmp_path, tethered=True)
    try:
        address = broker.start()
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        log = replace(LOG, bootstrap=address)
        hasty = replace(log, request_timeout_ms=1_500)  # how long it is waited for at the end
        await create_topics(log)
        async with cluster(log, LEASE_MS) as running:
            url = await running.gateway("gateway-1", accept_ms=LEASE_MS + 1_000, log=hasty)
            async with http_client(url) as client:
                headers = {"X-Session-Id": "through"}
                call = asyncio.create_task(
                    client.post("/v1/chat/completions", json=chat(stream=True), headers=headers)
                )
                request = await running.next_request("through")
                await running.answer(request, 0, 1)
                os.kill(broker.status().pid, signal.SIGKILL)
                while "no broker" not in (await client.get("/health/ready")).text:
                    assert await refused(client)  # until the lease has lapsed, and beyond
                assert broker.start() == address
                router = await running.join("router-2", MemberKind.ROUTER)
                await running.join("replica-2", MemberKind.WORKER)
                await until(lambda: ready(client))
                itself = router.view.members["gateway-1"].registration
                assert itself.started_ms == request.gateway_started_ms, "or its streams would end"
                await running.answer(request, 1, 3)
                assert text_of(events_of((await call).text)) == "".join(TEXTS)
            await running.leave()
            os.kill(broker.status().pid, signal.SIGKILL)  # and now it ends, with nobody to tell
    finally:
        await asyncio.to_thread(broker.stop)


async def refused(client: httpx.AsyncClient, why: str = "") -> bool:
    response = await client.post("/v1/chat/completions", json=chat())
    assert response.json()["error"]["code"] == "broker_unavailable"
    assert why in response.json()["error"]["message"]
    return response.status_code == 503

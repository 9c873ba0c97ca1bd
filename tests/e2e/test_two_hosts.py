"""Two hosts that share a log and hand KV over; the cable between them is cut, and mended."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.bench.faults.log_audit import audit
from infra.broker.section import BrokerSettings
from infra.processes.supervisor import ProcessSpec, SupervisedProcess, Supervisor
from infra.stack.fleet_watch import FleetWatch
from infra.stack.plan import StackPlan
from schemas.errors import ConfigError
from schemas.records import MemberKind, MemberState, Role
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from tests.e2e.harness import Answer, Client, PatientStack, sim_settings
from tests.e2e.hosts import DEVICE, HERE, Hosts, two_hosts
from tests.waits import START_S, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]

CUT_MS = 6_000  # more than two leases, by the clock that ends them
FAR, TOKENS, STREAMS = "far", 400, 4


async def test_worker_rejoins_with_its_engine_after_network_cut(tmp_path: Path) -> None:
    """The process is the same in a higher epoch, and KV crosses the cable again."""
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    log = LogSettings(session_partitions=1, worker_partitions=2, gateway_partitions=2)
    broker_settings = BrokerSettings(
        host=HERE, port=0, heap_mb=384, quick=True, start_timeout_s=180.0
    )
    settings = sim_settings(log, decode_step_ms=5.0, kv_devices=DEVICE)
    with two_hosts() as hosts:
        stack = PatientStack(
            replace(settings, broker=broker_settings), StackPlan(decode=0), folder=tmp_path
        )
        stack._supervisor = OnHost(hosts, hosts.first)
        second_host = OnHost(hosts, hosts.second)
        try:
            await stack.start()
            far = second_host.start(_worker(tmp_path))
            fleet = FleetWatch(stack.settings.log)
            await fleet.start()
            following = asyncio.create_task(fleet.follow())
            await until(lambda: _serving(fleet), seconds=START_S)
            first, pid = fleet.view.members[FAR], far.pid
            async with Client(stack.gateway_urls[0], settings.model.served_name) as client:
                answers = await _asked_over_a_cut(hosts, client, fleet)
            last_member, last_pid = fleet.view.members[FAR], far.pid
            log_audit = await audit(stack.settings.log)
            following.cancel()
            await fleet.stop()
        except ConfigError as error:
            if "broker.libs" not in error.message and "broker.java" not in error.message:
                raise
            pytest.skip(error.message)
        finally:
            await second_host.stop(grace_s=5)
            await stack.stop(grace_s=10)
    assert (last_pid, far.restarts) == (pid, 0)
    assert last_member.epoch > first.epoch
    assert last_member.registration.pid == first.registration.pid
    assert [answer.error for answer in answers if not answer.is_done] == []
    last = answers[-1].headers["x-request-id"]
    (outcome,) = log_audit.outcomes[last]
    assert outcome.kv_bytes > 0, "not computed in place"


class OnHost(Supervisor):
    """Starts processes on one of the hosts."""

    def __init__(self, hosts: Hosts, host: int) -> None:
        super().__init__()
        self._hosts, self._host = hosts, host

    def start(self, spec: ProcessSpec) -> SupervisedProcess:
        command = self._hosts.command(self._host, *spec.command)
        return super().start(replace(spec, command=command, forks=None))  # they are on one host


def _worker(folder: Path) -> ProcessSpec:
    trivium = (
        sys.executable,
        "-m",
        "infra.cli.app",
        "run",
        "worker",
        "--id",
        FAR,
        "--role",
        "decode",
    )
    config = ("--config", str(folder / "stack.toml"))
    return ProcessSpec(name=FAR, command=trivium + config, log_file=folder / "logs" / "far.log")


def _serving(fleet: FleetWatch) -> bool:
    member = fleet.view.members.get(FAR)
    return member is not None and member.state is MemberState.READY and member.is_alive(wall_ms())


def _is_as_before(fleet: FleetWatch, epoch: int) -> bool:
    """Whether the far worker serves in a new epoch, and no other has its role in the meantime."""
    workers = fleet.view.living(MemberKind.WORKER, wall_ms())
    decoders = [member.member_id for member in workers if Role.DECODE in member.registration.roles]
    return _serving(fleet) and fleet.view.members[FAR].epoch > epoch and decoders == [FAR]


async def _asked_over_a_cut(hosts: Hosts, client: Client, fleet: FleetWatch) -> list[Answer]:
    """Streams that are under way when the cable is cut, and one when it is whole again."""

    async def is_served() -> bool:
        return (await client.http.get("/health/ready")).status_code == 200

    await until(is_served)
    partial_answers = [Answer() for _ in range(STREAMS)]
    tasks = [
        asyncio.create_task(client.stream(f"Far {n}", into=answer, max_tokens=TOKENS))
        for n, answer in enumerate(partial_answers)
    ]
    await until(lambda: all(len(answer.token_ids) > 20 for answer in partial_answers))
    before, cut_ms = fleet.view.members[FAR], fleet.view._logged_ms
    hosts.cable("down")
    await until(lambda: fleet.view._logged_ms > cut_ms + CUT_MS)
    hosts.cable("up")
    answers = await asyncio.gather(*tasks)
    await until(lambda: _is_as_before(fleet, before.epoch))
    return [*answers, await client.stream("Near again")]

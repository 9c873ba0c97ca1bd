"""A process that sends calls, as a member of the fleet: it leases a partition of `tokens`.

It survives a loss of the broker: meanwhile it refuses calls, and afterwards it joins again with a
new epoch.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, NameTaken, NotReady
from schemas.fleet import FleetView, Member
from schemas.records import (
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
)
from schemas.settings import LogSettings
from streams.calls.config import GatewaySettings
from streams.calls.log.sender import RECONNECT_S, TROUBLE, LogSender, log_trouble
from streams.calls.log.tokens import TokenReader
from streams.calls.stream.hub import Hub
from streams.log.admin import check_retention, needs_of_requests
from streams.log.clock import wall_ms
from streams.log.membership import Membership
from streams.log.reading.faults import FAULTS
from streams.log.retry import Backoff

logger = logging.getLogger(__name__)
_ANSWERING = frozenset((Role.DECODE, Role.REPLICA))


class CallMember:
    """The membership. `run` maintains it; the other methods answer from its state.

    Without a `url`, as in a bridge, it serves no callers over HTTP, and is never the first of the
    gateways.
    """

    def __init__(
        self,
        log: LogSettings,
        codec: Codec,
        settings: GatewaySettings,
        *,
        member_id: str,
        started_ms: int,
        url: str,
        models: Sequence[str],
        hub: Hub,
        sender: LogSender,
        tokens: TokenReader,
    ) -> None:
        self._log, self._codec, self._settings = log, codec, settings
        self._member_id = member_id
        self._started_ms = started_ms  # of the process, in all epochs; routers use it as its id
        self._epoch = 0
        self._url = url
        self._models = models  # that calls may name, without adapters
        self._hub, self._sender, self._tokens = hub, sender, tokens
        self._membership: Membership | None = None
        sender.check_membership = self._valid_membership

    def reply_position(self, model: str = "", adapter: str = "") -> tuple[int, int]:
        position, membership = self.tokens_position(), self._valid_membership()
        if not self._has_ready_worker(membership, model, adapter):
            names_it = adapter or (model and len(self._models) > 1)
            what = f"the model {adapter or model!r}" if names_it else "the model"
            raise NotReady(f"no worker serves {what} at the moment; try again later")
        return position

    def tokens_position(self) -> tuple[int, int]:
        """Return the reply position even if no worker is ready; raises BrokerUnavailable."""
        partition = self._valid_membership().leases["tokens"]
        return partition, self._tokens.position(partition)

    def _valid_membership(self) -> Membership:
        membership = self._membership
        waits = membership is not None and membership.waits_for_leader()  # calls wait, too
        if (
            membership is None
            or self._sender.has_just_failed
            or not (waits or membership.is_valid())
        ):
            raise BrokerUnavailable(f"the log cannot be written: {self._sender.trouble}")
        itself = membership.view.members.get(self._member_id)
        if itself is None or not (waits or itself.is_alive(wall_ms())):
            raise BrokerUnavailable("nothing of the log is heard; is the broker away?")
        return membership

    def _living(self, membership: Membership, kind: MemberKind) -> Iterator[Member]:
        """Yield the members that were alive at this member's last heartbeat: later ones were not
        read."""
        return membership.view.living(kind, membership.view.members[self._member_id].seen_ms)

    def _has_ready_worker(self, membership: Membership, model: str = "", adapter: str = "") -> bool:
        """Return whether a worker that can answer is ready, of any served model if none is
        named."""
        models = (model,) if model else self._models
        return any(
            member.state is MemberState.READY
            and (capability := member.registration.capability) is not None
            and capability.model in models
            and (not adapter or adapter in capability.adapters)
            and not _ANSWERING.isdisjoint(member.registration.roles)
            for member in self._living(membership, MemberKind.WORKER)
        )

    def is_first(self) -> bool:
        """Return whether this gateway does the work that one gateway does for all."""
        membership = self._membership
        if membership is None or not membership.is_valid():
            return False
        living = self._living(membership, MemberKind.GATEWAY)
        names = [member.member_id for member in living if member.registration.url]
        return min(names, default="") == self._member_id

    def joined_view(self) -> FleetView | None:
        """Return the present view of the fleet; None while this process is no member."""
        return None if self._membership is None else self._membership.view

    def view(self) -> FleetView:
        """Return the present view of the fleet; empty while this process is no member."""
        return self.joined_view() or FleetView()

    @property
    def epoch(self) -> int:
        """Return the epoch of the membership; 0 while there is none."""
        return 0 if self._membership is None else self._epoch

    def living(self, kind: MemberKind) -> list[Member]:
        membership = self._membership
        if membership is None or self._member_id not in membership.view.members:
            return []
        return list(self._living(membership, kind))

    def servers(self, model: str) -> list[Registration]:
        registrations = (
            member.registration
            for member in self.view().members.values()
            if member.state is not MemberState.GONE
        )
        return [
            registration
            for registration in registrations
            if registration.kind is MemberKind.ROUTER
            or (registration.capability is not None and registration.capability.model == model)
        ]

    def problems(self) -> list[str]:
        try:
            membership = self._valid_membership()
        except BrokerUnavailable as error:
            return [error.message]
        problems = []
        if not any(self._living(membership, MemberKind.ROUTER)):
            problems.append("no router is alive")
        if not self._has_ready_worker(membership):
            problems.append("no decode worker is ready, nor a replica")
        for partition in self._tokens.positions:
            place = f"{self._log.topic_prefix}tokens[{partition}]"
            if why := FAULTS.why_failing(place):
                problems.append(f"{place}: {why}")
        return problems

    def unserved(self) -> list[str]:
        membership = self._membership
        if len(self._models) == 1 or membership is None or self.problems():
            return []
        return [
            f"model {model!r}: no decode worker is ready, nor a replica"
            for model in self._models
            if not self._has_ready_worker(membership, model)
        ]

    async def run(self, *topics: Coroutine[Any, Any, None]) -> None:
        """Join the fleet, and join again after every failure of the log, until cancelled.

        `topics` run beside it: they read and write other topics with the same producer. Raises
        ConfigError if the log's retention is shorter than a request may live, and NameTaken.
        """
        loop, pauses = asyncio.get_running_loop(), Backoff(RECONNECT_S)  # callers wait for the log
        try:
            async with asyncio.TaskGroup() as tasks:
                for topic in topics:
                    tasks.create_task(topic)
                while True:
                    began_s = loop.time()
                    try:
                        await self._stay_joined(tasks)
                    except NameTaken:  # routers would take this process's requests for lost
                        raise
                    except TROUBLE as error:
                        self._sender.trouble = f"{type(error).__name__}: {error}"
                        logger.warning("%s: %s", self._member_id, self._sender.trouble)
                    await asyncio.sleep(pauses.after(loop.time() - began_s))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            await self._sender.stop()

    async def _stay_joined(self, tasks: asyncio.TaskGroup) -> None:
        if self._sender.started() is None:
            await check_retention(self._log, needs_of_requests(self._settings.deadline_ms_max))
        membership = Membership(
            self._log,
            self._codec,
            await self._sender.start(),
            member_id=self._member_id,
            kind=MemberKind.GATEWAY,
            lease_topics=("tokens",),
            url=self._url,
            on_record=lambda record, *_: self._check_name(membership, record),
            former_epoch=self._epoch,
            started_ms=self._started_ms,
        )
        membership.load_source = lambda: Load(running=len(self._hub))
        try:
            await membership.join()
            await self._tokens.read(membership.leases["tokens"], tasks)
            membership.set_state(MemberState.READY)
            self._membership, self._epoch = membership, membership.epoch
            self._sender.trouble = "no heartbeat was acknowledged"
            await membership.run()
        finally:
            self._membership = None
            self._epoch = membership.epoch or self._epoch
            await log_trouble(membership.leave)

    def _check_name(self, membership: Membership, record: Registration | Heartbeat) -> None:
        if isinstance(record, Registration):
            membership.check_name(record)

    async def drain(self) -> None:
        """Report to the fleet that this process takes no more calls."""
        membership = self._membership
        if membership is not None:
            membership.set_state(MemberState.DRAINING)
            limit_s = self._settings.accept_ms / 1000
            await log_trouble(lambda: asyncio.wait_for(membership.beat_now(), limit_s))

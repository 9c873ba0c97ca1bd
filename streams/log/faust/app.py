"""A Faust app as Trivium uses it: its settings, its agents, its run.

Faust receives and acknowledges, nothing else: values are raw, no tables, no web server, and every
send goes through the process's own producer. Agents run one at a time per topic and pass each event
to an `EventHandler`. `streams/log/faust/patches.py` changes Faust itself.
"""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from aiokafka import ConsumerRecord

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from schemas.state_folder import home, private_folder
from streams.log.connecting import client_options
from streams.log.faust import library, patches
from streams.log.faust.group import Place


class EventHandler(Protocol):
    """The object to which agents pass their events."""

    async def take(self, topic: str, event: Any) -> None:
        """Take one record of a topic, and call the event's `ack`, in order. Raise nothing
        (`Group.guard`)."""


class RebalanceListener(Protocol):
    """The object that is notified of rebalances; `streams/log/faust/group.py` does most of it."""

    def on_assigned(self, places: set[Place]) -> None:
        """Take these partitions; the member has no others."""

    async def on_revoked(self) -> None:
        """Give up all partitions; other members may have them when this returns."""


class GroupMember(EventHandler, RebalanceListener, Protocol):
    """A group's member: takes events and is notified of rebalances."""


def _credentials(log: LogSettings) -> Any:
    options = client_options(log)
    context = options.get("ssl_context")
    if "sasl_mechanism" in options:
        return library.SASLCredentials(
            mechanism=log.sasl_mechanism,
            username=log.sasl_username,
            password=log.sasl_password,
            ssl_context=context,
        )
    return library.SSLCredentials(context) if context is not None else None


def make_app(
    log: LogSettings, *, group: str, member_id: str, buffer_max: int = 4_096,
    leaves_group: bool = False, reads_committed: bool = False,
) -> library.App:  # fmt: skip
    """Return an app without agents; call `add_agents` next. `buffer_max` records wait per agent.

    A member that stops keeps its place in the group until its session ends, ten seconds later: if
    it starts again by then, there is no rebalance. With `leaves_group` it leaves instead, and the
    others take its partitions at their next heartbeats. With `reads_committed` the app gets records
    of transactions only after their commit.
    """
    patches.check()
    private_folder(home())
    datadir = home() / "faust"  # Faust creates one although it stores nothing there
    private_folder(datadir)
    app = patches.App(
        group,
        broker=[f"kafka://{address}" for address in log.bootstrap.split(",")],
        broker_credentials=_credentials(log),
        broker_client_id=member_id,
        value_serializer="raw",
        key_serializer="raw",
        store="memory://",
        web_enabled=False,
        TableManager=patches.NoTables,
        HttpClient=library.ClientSession,  # a stand-in: none of our code makes an HTTP client
        topic_disable_leader=True,
        topic_allow_declare=False,
        processing_guarantee="at_least_once",
        producer_linger=0,
        producer_acks=-1,
        producer_request_timeout=10,
        broker_commit_interval=0.5,
        broker_commit_every=10_000,
        broker_max_poll_records=2_000,
        broker_session_timeout=10,
        broker_heartbeat_interval=2,
        broker_rebalance_timeout=15,
        broker_request_timeout=30,
        stream_buffer_maxsize=buffer_max,
        stream_wait_empty=False,
        table_standby_replicas=0,
        consumer_group_instance_id=member_id,
        consumer_metadata_max_age_ms=30_000,
        consumer_auto_offset_reset="earliest",
        worker_redirect_stdouts=False,
        datadir=datadir,
    )
    patches.install(app, leaves_group=leaves_group, reads_committed=reads_committed)
    return app


def add_agents(
    app: library.App, prefix: str, name: str, topics: Sequence[str], handler: EventHandler
) -> list[Any]:
    """Add one agent per topic; each passes its events to `handler`."""

    def agent_of(topic: str) -> Any:
        async def agent(stream: Any) -> None:
            async for event in stream.noack().events():
                await handler.take(topic, event)

        source = app.topic(prefix + topic, key_type=bytes, value_type=bytes, value_serializer="raw")
        return app.agent(source, name=f"{name}.{topic}", concurrency=1)(agent)

    return [agent_of(topic) for topic in topics]


def follow_rebalances(app: library.App, prefix: str, listener: RebalanceListener) -> None:
    """Notify the listener of its partitions, by their topics' names in the table."""

    async def on_assigned(sender: Any, assigned: Any, **_: Any) -> None:
        listener.on_assigned({(tp.topic.removeprefix(prefix), tp.partition) for tp in assigned})

    async def on_revoked(sender: Any, revoked: Any, **_: Any) -> None:
        await listener.on_revoked()

    app.on_partitions_assigned.connect(on_assigned)
    app.on_partitions_revoked.connect(on_revoked)


def pause_partition(event: Any) -> None:
    """Stop fetching from the partition of an agent's event, until `resume_partition`."""
    event.app.consumer.pause_partitions({_place_of(event)})


def resume_partition(event: Any) -> None:
    """Fetch records of that partition again."""
    event.app.consumer.resume_partitions({_place_of(event)})


def _place_of(event: Any) -> Any:
    """Return Faust's own `TP`: its messages have aiokafka's, which its consumer refuses."""
    return library.TP(event.message.topic, event.message.partition)


def fetched_ends(app: library.App, prefix: str, places: Collection[Place]) -> dict[Place, int]:
    """Return the offsets after the last records of these partitions, as of the last fetches, for
    those that the app's consumer has; sends no request to the broker."""
    if not places:
        return {}
    consumer, ends = app.consumer, dict[Place, int]()
    assignment = consumer.assignment()
    for topic, partition in places:
        place = library.TP(prefix + topic, partition)
        end = consumer.highwater(place) if place in assignment else None
        if end is not None:
            ends[topic, partition] = end
    return ends


async def run_app(app: library.App) -> None:
    """Run the app, and raise BrokerUnavailable when it ends.

    Our agents raise nothing, so an error that ends it comes from its consumer.
    """
    await app.start()
    app.sensors.remove(app.monitor)  # it costs much per record, and is not used
    await app.wait_until_stopped()
    reason = app.crash_reason
    raise BrokerUnavailable(f"the consumer ended: {type(reason).__name__}: {reason}") from reason


def consumer_record(message: Any) -> ConsumerRecord:
    """Return Faust's message as aiokafka's record, with its raw value."""
    headers = message.headers or ()
    if isinstance(headers, dict):
        headers = headers.items()
    return ConsumerRecord(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        timestamp=int((message.timestamp or 0) * 1000),
        timestamp_type=message.timestamp_type,
        key=message.key,
        value=message.value,
        checksum=None,
        serialized_key_size=-1,
        serialized_value_size=-1,
        headers=tuple(headers),
    )

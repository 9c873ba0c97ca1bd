"""Runs several Kafka nodes on this machine, each a broker and a controller, from the same jars.

For trials of a replicated log when a broker dies: another node then leads its partitions. A
deployment with several brokers uses a cluster of its own.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from infra.broker.node import Broker, BrokerState, new_cluster_id
from infra.broker.probe import free_ports
from infra.broker.section import BrokerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlacement:
    """The place of a node in a cluster of several, with its ports."""

    node: int  # its id, from 1
    cluster: str  # the cluster's id
    controller_port: int
    voters: tuple[str, ...]  # id@host:port of every controller

    def properties(self) -> dict[str, str]:
        """Return the settings that differ from those of a single node."""
        copies = str(min(3, len(self.voters)))
        internal = ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
        return {
            "node.id": str(self.node),
            "controller.quorum.voters": ",".join(self.voters),
            **{f"{topic}.replication.factor": copies for topic in internal},
            **{f"{topic}.min.isr": str(int(copies) // 2 + 1) for topic in internal[1:]},
        }


class Node(Broker):
    """A broker that is one of several in a cluster."""

    def __init__(self, settings: BrokerSettings, folder: Path, place: NodePlacement) -> None:
        super().__init__(settings, folder, tethered=True)
        self._place = place

    def _choose_ports(self, last: BrokerState | None) -> tuple[int, int]:
        return self._settings.port, self._place.controller_port

    def _write_properties(self, port: int, controller_port: int) -> None:
        super()._write_properties(port, controller_port)
        overrides, alone = self._place.properties(), self._properties.read_text().splitlines()
        lines = [line for line in alone if line.partition("=")[0] not in overrides]
        lines = [line for line in lines if "quorum.bootstrap" not in line]
        lines += [f"{name}={value}" for name, value in overrides.items()]
        self._properties.write_text("\n".join(lines))

    def _copy_storage(self) -> bool:
        return False  # the template is for a single node

    def _cluster(self) -> list[str]:
        return ["-t", self._place.cluster]


class BrokerCluster:
    """A cluster of several brokers under one folder, by node id from 1."""

    def __init__(self, settings: BrokerSettings, folder: Path, count: int = 3) -> None:
        ports = free_ports(*[settings.host] * count, *["127.0.0.1"] * count)
        voters = tuple(f"{node + 1}@127.0.0.1:{ports[count + node]}" for node in range(count))
        name = new_cluster_id()
        self.brokers: dict[int, Broker] = {
            node: Node(
                replace(settings, port=ports[node - 1]),
                folder / f"broker-{node}",
                NodePlacement(
                    node=node,
                    cluster=name,
                    controller_port=ports[count + node - 1],
                    voters=voters,
                ),
            )
            for node in range(1, count + 1)
        }
        self.bootstrap = ",".join(f"{settings.host}:{port}" for port in ports[:count])

    def start(self) -> str:
        """Start all nodes and return their addresses; none serves before most have started.

        Runs in the calling thread: a tethered broker ends with the thread that started it.
        """
        for broker in self.brokers.values():
            broker.spawn()
        for broker in self.brokers.values():
            broker.start()
        return self.bootstrap

    def reset(self) -> None:
        """Stop all nodes, and delete their records, topics and logs."""
        for broker in self.brokers.values():
            broker.reset()

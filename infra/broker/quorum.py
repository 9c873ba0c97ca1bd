"""Several Kafka nodes on this machine, each a broker and a controller, from the same jars.

For trying what becomes of a log with copies when a broker dies: a leader's partitions go on at
another node. Used by tests; a deployment with several brokers brings its own cluster.
"""

from dataclasses import replace
from pathlib import Path

from infra.broker.node import Broker, Place, new_cluster_id
from infra.broker.probe import free_ports
from infra.broker.section import BrokerSettings


class Cluster:
    """So many brokers under one folder, by node id from 1."""

    def __init__(self, settings: BrokerSettings, folder: Path, count: int = 3) -> None:
        ports = free_ports(*[settings.host] * count, *["127.0.0.1"] * count)
        voters = [f"{node + 1}@127.0.0.1:{ports[count + node]}" for node in range(count)]
        name = new_cluster_id()
        self.brokers = {
            node: Broker(
                replace(settings, port=ports[node - 1]),
                folder / f"broker-{node}",
                tethered=True,
                place=Place(
                    node=node,
                    cluster=name,
                    controller_port=ports[count + node - 1],
                    voters=tuple(voters),
                ),
            )
            for node in range(1, count + 1)
        }
        self.bootstrap = ",".join(f"{settings.host}:{port}" for port in ports[:count])

    def start(self) -> str:
        """Start all together, since none serves before most are there; returns the addresses.

        In this thread, with whose end a tethered broker ends.
        """
        for broker in self.brokers.values():
            broker.spawn()
        for broker in self.brokers.values():
            broker.start()
        return self.bootstrap

    def reset(self) -> None:
        """Stop all, and delete what they hold."""
        for broker in self.brokers.values():
            broker.reset()

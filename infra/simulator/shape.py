"""The workers of a simulated cluster, by kind."""

import re
from dataclasses import dataclass

from schemas.records import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """The number of workers of each kind."""

    prefill: int = 0
    decode: int = 0
    both: int = 0  # in the roles prefill and decode
    replica: int = 0

    @classmethod
    def parse(cls, name: str) -> "ClusterShape":
        """Return the shape of a name such as 2P2D."""
        counts = {kind: int(count) for count, kind in re.findall(r"(\d+)([PDBR])", name)}
        return cls(
            prefill=counts.get("P", 0),
            decode=counts.get("D", 0),
            both=counts.get("B", 0),
            replica=counts.get("R", 0),
        )

    @property
    def name(self) -> str:
        """Return the name of the shape, such as 2P2D, 4B or 1P1D2R."""
        kinds = (("P", self.prefill), ("D", self.decode), ("B", self.both), ("R", self.replica))
        return "".join(f"{count}{kind}" for kind, count in kinds if count)

    def roles(self) -> list[tuple[str, tuple[Role, ...]]]:
        """Return the worker ids with their roles."""
        kinds = (
            ("prefill", (Role.PREFILL,), self.prefill),
            ("decode", (Role.DECODE,), self.decode),
            ("both", (Role.PREFILL, Role.DECODE), self.both),
            ("replica", (Role.REPLICA,), self.replica),
        )
        return [(f"{name}-{i}", roles) for name, roles, count in kinds for i in range(count)]

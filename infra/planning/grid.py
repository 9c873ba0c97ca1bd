"""The grid of the PPD paper: 18 workloads, 10 loads, 17 configurations of four GPUs.

Lengths, loads and configurations are those of the paper (arXiv:2603.13358) and of the authors'
benchmark (github.com/freelulul/vllm-ppd, scripts/benchmark): two-turn conversations whose second
turn follows at once, from a client with at most 50 connections.
"""

from dataclasses import dataclass
from itertools import product

from infra.simulator.traffic.poisson import Profile, TurnShape

LOADS_PER_S = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)  # conversations
LEVELS = {"low": LOADS_PER_S[:3], "medium": LOADS_PER_S[3:6], "high": LOADS_PER_S[7:]}  # 10: none
DURATION_MS = 10_000.0
TIMEOUT_MS = 30_000
CONVERSATIONS_MAX = 50  # at a time

FIRST_TURNS = {
    "small": TurnShape(input_tokens=128, output_tokens=128),
    "large": TurnShape(input_tokens=1_024, output_tokens=1_024),
}
SECOND_TURNS = {
    "tiny": TurnShape(input_tokens=16, output_tokens=32),
    "short gen": TurnShape(input_tokens=32, output_tokens=256),
    "long gen": TurnShape(input_tokens=32, output_tokens=512),
    "very long gen": TurnShape(input_tokens=64, output_tokens=1_024),
    "small bal": TurnShape(input_tokens=64, output_tokens=64),
    "mid bal": TurnShape(input_tokens=128, output_tokens=128),
    "mid paste": TurnShape(input_tokens=256, output_tokens=64),
    "big paste": TurnShape(input_tokens=512, output_tokens=64),
    "huge paste": TurnShape(input_tokens=1_024, output_tokens=32),
}

RATIOS = ("1P3D", "2P2D", "3P1D")
SHARES = {"0": 0.0, "1/3": 1 / 3, "1/2": 0.5, "2/3": 2 / 3, "1": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload, named by its first and its later turns."""

    name: str
    profile: Profile

    @property
    def kind(self) -> str:
        """Return the kind by the later turns, as the paper groups its workloads: 4, 2 and 3 of
        nine."""
        later = self.profile.later
        if later.input_tokens == later.output_tokens:
            return "balanced"
        is_pasted = later.input_tokens > later.output_tokens
        return "prefill-heavy" if is_pasted else "decode-heavy"


WORKLOADS = tuple(
    Workload(
        name=f"{first}, {second}",
        profile=Profile(first=FIRST_TURNS[first], later=SECOND_TURNS[second], think_ms=0.0),
    )
    for first, second in product(FIRST_TURNS, SECOND_TURNS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Pools and the router's policy.

    `plain` is serving as published (`authors_serving.py`): conversations are assigned by hash, the
    share is that of the decode workers, the prompt's whole KV moves at every turn, after the
    prefill, over the authors' connector, and the KV of an answer is not found again. Otherwise the
    router places requests, KV that the receiver has cached is not sent, and remote turns run in
    vLLM's default order, or with `all_orders` in the best of the three.
    """

    pools: str
    policy: str
    share: str = ""
    plain: bool = False
    all_orders: bool = False
    thresholds: tuple[int, float] | None = None  # of `conditional`; None: the default ones

    @property
    def name(self) -> str:
        """Return the name, such as `2P2D x=1/2` or `1P3D learned`."""
        if self.policy == "replica":
            return self.pools
        how = f"x={self.share}" if self.policy == "static" else self.policy
        if self.thresholds is not None:
            how += f" {self.thresholds[0]}/{self.thresholds[1]:g}"
        ending = f"{' plain' if self.plain else ''}{', all orders' if self.all_orders else ''}"
        return f"{self.pools} {how}{ending}"

    @property
    def kind(self) -> str:
        """Return the kind by which the paper groups configurations."""
        if "R" in self.pools:
            return "replica" if self.policy == "replica" else "hybrid"
        return f"x={self.share}" if self.share in ("0", "1") else "0<x<1"


def static(pools: str, share: str, *, plain: bool = False) -> Config:
    """Return a configuration in which a fixed share of later turns is local."""
    return Config(pools=pools, policy="static", share=share, plain=plain)


_SHARES_OF = {  # one share for each number of decode workers that may prefill
    "1P3D": ("0", "1/3", "2/3", "1"),
    "2P2D": ("0", "1/2", "1"),
    "3P1D": ("0", "1"),
    "1P2D1R": ("0", "1/2", "1"),
    "2P1D1R": ("0", "1"),
    "1P1D2R": ("0", "1"),
}
CONFIGS = (
    Config(pools="4R", policy="replica", plain=True),
    *(static(pools, share, plain=True) for pools, some in _SHARES_OF.items() for share in some),
)
# Configurations beyond the paper's: fixed shares, which define regret, and the policies.
OURS = tuple(
    config
    for pools in RATIOS
    for config in (
        *(static(pools, share) for share in SHARES),
        Config(pools=pools, policy="conditional"),
        Config(pools=pools, policy="table"),
        Config(pools=pools, policy="learned"),
    )
)

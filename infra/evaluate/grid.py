"""The grid of the PPD paper: 18 workloads, 10 loads, 17 configurations of four GPUs.

The paper gives the shape of its grid; lengths are ours, chosen by capacity alone. A prefill worker
computes about 37 000 tokens/s, a decode worker holds about 427 000 tokens of KV. At the lowest load
every workload is easy; at the highest, first turns of the long profile take all of one prefill
worker, the longest inputs overload two, and the longest answers fill one decode worker.
"""

from dataclasses import dataclass
from itertools import product

from infra.simulator.workload import Profile, Shape

LOADS_PER_S = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)  # conversations
LEVELS = {"low": LOADS_PER_S[:3], "medium": LOADS_PER_S[3:7], "high": LOADS_PER_S[7:]}
DURATION_MS = 10_000.0
TIMEOUT_MS = 30_000

FIRST_TURNS = {
    "short": Shape(input_tokens=512, output_tokens=128),
    "long": Shape(input_tokens=2_048, output_tokens=128),
}
NEW_INPUT_TOKENS = (64, 512, 2_048)
NEW_OUTPUT_TOKENS = (64, 128, 256)

RATIOS = ("1P3D", "2P2D", "3P1D")
SHARES = {"0": 0.0, "1/3": 1 / 3, "1/2": 0.5, "2/3": 2 / 3, "1": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A turn-1 profile and a turn-2 profile."""

    name: str
    profile: Profile

    @property
    def prefill_heavy(self) -> bool:
        """More comes in than goes out, after the first turn."""
        return self.profile.later.input_tokens > self.profile.later.output_tokens


WORKLOADS = tuple(
    Workload(
        name=f"{first}+{new_in}/{new_out}",
        profile=Profile(
            first=FIRST_TURNS[first], later=Shape(input_tokens=new_in, output_tokens=new_out)
        ),
    )
    for first, new_in, new_out in product(FIRST_TURNS, NEW_INPUT_TOKENS, NEW_OUTPUT_TOKENS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Pools and how the router uses them.

    `plain` is disaggregation as published: the prompt's whole KV moves at every turn, after the
    prefill; otherwise what the receiver has cached stays where it is.
    """

    pools: str
    policy: str
    share: str = ""
    plain: bool = False

    @property
    def name(self) -> str:
        """Such as `2P2D x=1/2` or `1P3D learned`."""
        if self.policy == "replica":
            return self.pools
        how = f"x={self.share}" if self.policy == "static" else self.policy
        return f"{self.pools} {how}{' plain' if self.plain else ''}"


def static(pools: str, share: str, *, plain: bool = False) -> Config:
    """A fixed share of later turns is local."""
    return Config(pools=pools, policy="static", share=share, plain=plain)


HYBRIDS = ("1P1D2R", "1P2D1R", "2P1D1R")
CORE = (
    Config(pools="4R", policy="replica"),
    *(
        config
        for pools in RATIOS
        for config in (static(pools, "0", plain=True), static(pools, "1/2"), static(pools, "1"))
    ),
)
HYBRID = (
    *(static(pools, share) for pools in HYBRIDS for share in ("0", "1")),
    static("1P1D2R", "1/2"),
)
CONFIGS = CORE + HYBRID
# Beside the paper's: what regret is measured with, and the policies.
OURS = tuple(
    config
    for pools in RATIOS
    for config in (
        static(pools, "0"),
        static(pools, "1/3"),
        static(pools, "2/3"),
        Config(pools=pools, policy="conditional"),
        Config(pools=pools, policy="table"),
        Config(pools=pools, policy="learned"),
    )
)

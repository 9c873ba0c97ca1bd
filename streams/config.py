"""Section [router] of the settings file; `streams/calls/config.py` has the gateway's."""

from math import isfinite
from typing import Annotated, NamedTuple

from schemas.errors import ConfigError
from schemas.records import Priority, Role
from schemas.sections import Natural, NonNegative, Positive, Share, one_of, section
from schemas.topics import HOUR_MS, TOPICS


class PolicyEntry(NamedTuple):
    """A placement policy: its class, as module:class, and the roles of which it needs workers."""

    path: str
    needs: tuple[tuple[Role, ...], ...] = ((Role.DECODE,),)  # all roles of one of these tuples


_FOLDER = "streams.core.placement.policies"
POLICY_ENTRIES = {
    "learned": PolicyEntry(f"{_FOLDER}.learned:LearnedPolicy"),
    "table": PolicyEntry(f"{_FOLDER}.table:TablePolicy"),
    "conditional": PolicyEntry(f"{_FOLDER}.conditional:ConditionalPolicy"),
    "static": PolicyEntry(f"{_FOLDER}.fixed:StaticPolicy"),
    "pairs": PolicyEntry(f"{_FOLDER}.rotation:PairsPolicy", ((Role.PREFILL, Role.DECODE),)),
    "round_robin": PolicyEntry(
        f"{_FOLDER}.rotation:RoundRobinPolicy", ((Role.DECODE,), (Role.REPLICA,))
    ),
    "replica": PolicyEntry(f"{_FOLDER}.fixed:ReplicaPolicy", ((Role.REPLICA,),)),
}
"""The placement policies by name: the registry. `router.policy` and requests choose from it."""
POLICIES = tuple(POLICY_ENTRIES)
# Assumed until measured, and for slack: roughly a GPU's speed with a model of 8 billion parameters.
ASSUMED_PREFILL_TOKENS_PER_S = 10_000
ASSUMED_STEP_MS = 10.0  # of an answer's token
ORCHESTRATIONS = ("auto", "prefill_first", "decode_first", "concurrent")


@section("router")
class RouterSettings:
    """Settings of admission, placement, stored state and recovery; with every bound of the core."""

    policy: Annotated[str, one_of(*POLICIES)] = "learned"
    local_share: Share = 0.0  # static: share of later turns computed on their decode worker
    max_local_prefill_tokens: Natural = 1_000  # conditional: up to here, decode workers compute
    # conditional: likewise from this prefill queue on, in requests per worker
    max_prefill_queue: NonNegative = 2.0
    table: str = ""  # table: the file that `trivium plan ppd` has written
    w_ttft: NonNegative = 0.5  # table and learned: weight of time to first token
    w_tpot: NonNegative = 0.5  # likewise of time per output token
    w_kv: NonNegative = 0.02  # learned: weight of moving KV, per thousand tokens
    weights_interactive: str = ""  # "w_ttft/w_tpot" of a class, as 0.8/0.2; empty: as above
    weights_standard: str = ""
    weights_batch: str = ""
    explore_share: Share = 0.02  # learned: largest share of requests placed to learn from them
    explore_slack_ms: Natural = 10_000  # learned: least slack of such requests
    samples_min: Natural = 20  # learned: least observations of a model before it is used
    # or prefill_first, decode_first, concurrent
    orchestration: Annotated[str, one_of(*ORCHESTRATIONS)] = "auto"
    reuse_tokens_min: Positive = 256  # auto: decode_first with this much more KV on decode
    prefix_blocks_max: Positive = 1_000_000  # indexed KV blocks; the oldest are evicted first
    queue_requests_max: Positive = 10_000  # in a model's queue; above it the worst are shed
    queue_tokens_max: Positive = 8_000_000  # prompt tokens in a model's queue; likewise
    # decode workers compute prompts after this time without a prefill worker
    local_after_ms: Positive = 3_000
    # a prefill worker decodes too after this time without a decode worker or replica; 0: never
    lends_after_ms: Natural = 5_000
    # how long after the loss of its gateway a request ends, unless its client resumes it
    gateway_grace_ms: Positive = 30_000
    sessions_max: Positive = 100_000  # stored sessions; the least recently used are evicted first
    session_ttl_ms: Positive = 3_600_000  # a session is dropped after this time without a turn
    continues: bool = True  # new attempts continue an answer where it stopped
    # a worker that lacks at least this many tokens of a prompt's beginning prefills them during
    # the search; 0: never
    warm_tokens_min: Natural = 512
    # sessions whose passages are inserted again in later turns; 0: none
    histories_max: Natural = 10_000
    histories_bytes_max: Positive = 64 << 20  # of these
    ended_max: Positive = 200_000  # stored ids of ended requests
    tick_ms: Positive = 50
    snapshot_ms: Positive = 600_000  # between snapshots in the journal, where replays can begin

    def __post_init__(self) -> None:
        for priority in Priority:
            self.weights(priority)
        kept_ms = TOPICS["sessions"].retention_ms - HOUR_MS
        if self.session_ttl_ms > kept_ms:
            raise ConfigError(
                f"router.session_ttl_ms: expected at most {kept_ms}, while the log keeps "
                f"conversations, found {self.session_ttl_ms}"
            )

    def weights(self, priority: Priority) -> tuple[float, float]:
        """Return (w_ttft, w_tpot) of a class. Raise ConfigError unless its text is two numbers."""
        text = getattr(self, f"weights_{priority.value}")
        if not text:
            return self.w_ttft, self.w_tpot
        try:
            w_ttft, w_tpot = (float(part) for part in text.split("/"))
        except ValueError:
            w_ttft = w_tpot = -1.0
        if not (w_ttft >= 0 and w_tpot >= 0 and isfinite(w_ttft + w_tpot)):
            raise ConfigError(
                f"router.weights_{priority.value}: expected two weights from 0 as 0.8/0.2, "
                f"found {text!r}"
            )
        return w_ttft, w_tpot

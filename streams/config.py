"""Section [router] of the settings file; the gateway's lives in streams/gateway/config.py."""

from dataclasses import dataclass
from math import isfinite

from schemas.errors import ConfigError
from schemas.records import Priority
from schemas.topics import HOUR_MS, TOPICS

POLICIES = ("learned", "table", "conditional", "static", "replica")
ORCHESTRATIONS = ("auto", "prefill_first", "decode_first", "concurrent")
_CHOICES = {"policy": POLICIES, "orchestration": ORCHESTRATIONS}
_FROM_ZERO = set(
    "handover_ahead local_share max_local_prefill_tokens max_prefill_queue w_ttft w_tpot w_kv "
    "explore_share explore_slack_ms samples_min".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How a router admits, places, remembers and recovers; names every bound of the core."""

    policy: str = "learned"  # or table, conditional, static, replica
    local_share: float = 0.0  # static: share of later turns computed on their decode worker
    max_local_prefill_tokens: int = 1_000  # conditional: up to here on the decode worker
    max_prefill_queue: float = 2.0  # conditional: from here on too, in requests per worker
    table: str = ""  # table: the file that `trivium plan ppd` wrote
    w_ttft: float = 0.5  # table and learned: weight of time to first token
    w_tpot: float = 0.5  # likewise of time per output token
    w_kv: float = 0.02  # learned: weight of moving KV, per thousand tokens
    weights_interactive: str = ""  # "w_ttft/w_tpot" of a class, as 0.8/0.2; empty: as above
    weights_standard: str = ""
    weights_batch: str = ""
    explore_share: float = 0.02  # learned: most requests that are placed to learn from them
    explore_slack_ms: int = 10_000  # learned: requests with less slack are not
    samples_min: int = 20  # learned: fewer observations of a part are too few
    orchestration: str = "auto"  # or prefill_first, decode_first, concurrent
    reuse_tokens_min: int = 256  # auto: so much more KV on the decode worker: decode_first
    prefix_blocks_max: int = 1_000_000  # known KV blocks; the oldest go first
    queue_requests_max: int = 10_000  # waiting for admission; above it the worst are shed
    queue_tokens_max: int = 8_000_000  # prompt tokens waiting for admission; likewise
    ageing_ms: int = 5_000  # a waiting request rises one priority class per this time
    attempts_max: int = 3  # placements of one request that workers fail before it fails
    losses_max: int = 12  # workers that may be lost under one request before it fails
    apply_tries_max: int = 3  # routers that may fail over one request before it fails
    handover_ahead: int = 4  # prefills dispatched beyond the free decode credits
    handover_margin_ms: int = 1_000  # a KV handle that expires sooner is not used
    local_after_ms: int = (
        3_000  # without a prefill worker for so long, decode workers compute prompts
    )
    deadline_grace_ms: int = 5_000  # how long after its deadline a worker may still end a request
    gateway_grace_ms: int = 30_000  # so long after its gateway was lost, what nobody resumed ends
    assumed_prefill_tokens_per_s: int = 10_000  # for slack, where nothing is measured
    assumed_step_ms: float = 10.0  # likewise, per token of the answer
    candidates_max: int = 4  # workers named in a decision
    sessions_max: int = 100_000  # remembered conversations; the least recently used go first
    session_ttl_ms: int = 3_600_000  # without a turn for so long, a conversation is forgotten
    ended_max: int = 200_000  # remembered ids of ended requests
    early_cancels_max: int = 10_000  # cancellations read before their request
    tick_ms: int = 50
    journal_flush_ms: int = 200
    sends_pending_max: int = 10_000  # unacknowledged sends; above it the agents wait
    stall_exit_ms: int = 15_000  # lag without progress for so long ends the process

    def __post_init__(self) -> None:
        for name in self.__slots__:
            self._check(name, getattr(self, name))
        for priority in Priority:
            self.weights(priority)

        kept_ms = TOPICS["sessions"].retention_ms - HOUR_MS
        if self.session_ttl_ms > kept_ms:
            raise ConfigError(
                f"router.session_ttl_ms: expected at most {kept_ms}, while the log keeps "
                f"conversations, found {self.session_ttl_ms}"
            )

    def _check(self, name: str, value: str | float) -> None:
        if isinstance(value, str):
            expected = _CHOICES.get(name, (value,))
            if value not in expected:
                one_of = ", ".join(expected)
                raise ConfigError(f"router.{name}: expected one of {one_of}, found {value!r}")
        elif not isfinite(value):
            raise ConfigError(f"router.{name}: expected a finite number, found {value}")
        elif name.endswith("_share") and not 0 <= value <= 1:
            raise ConfigError(f"router.{name}: expected 0 to 1, found {value}")
        elif name in _FROM_ZERO and value < 0:
            raise ConfigError(f"router.{name}: expected at least 0, found {value}")
        elif name not in _FROM_ZERO and value < 1:
            raise ConfigError(f"router.{name}: expected a positive number, found {value}")

    def weights(self, priority: Priority) -> tuple[float, float]:
        """(w_ttft, w_tpot) of a class. Raises ConfigError for text that is not two numbers."""
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

"""Section [router] of the settings file; the gateway's lives in streams/gateway/config.py."""

from math import isfinite
from typing import Annotated

from pydantic import Field

from schemas.errors import ConfigError
from schemas.records import Priority
from schemas.sections import Natural, NonNegative, Positive, Share, one_of, section
from schemas.topic import HOUR_MS
from schemas.topics import TOPICS

POLICIES = ("learned", "table", "conditional", "static", "pairs", "round_robin", "replica")
ORCHESTRATIONS = ("auto", "prefill_first", "decode_first", "concurrent")


@section("router")
class RouterSettings:
    """How a router admits, places, remembers and recovers; names every bound of the core."""

    # or table, conditional, static, pairs, round_robin, replica
    policy: Annotated[str, one_of(*POLICIES)] = "learned"
    local_share: Share = 0.0  # static: share of later turns computed on their decode worker
    max_local_prefill_tokens: Natural = 1_000  # conditional: up to here on the decode worker
    # conditional: from here on too, in requests per worker
    max_prefill_queue: NonNegative = 2.0
    table: str = ""  # table: the file that `trivium plan ppd` wrote
    w_ttft: NonNegative = 0.5  # table and learned: weight of time to first token
    w_tpot: NonNegative = 0.5  # likewise of time per output token
    w_kv: NonNegative = 0.02  # learned: weight of moving KV, per thousand tokens
    weights_interactive: str = ""  # "w_ttft/w_tpot" of a class, as 0.8/0.2; empty: as above
    weights_standard: str = ""
    weights_batch: str = ""
    explore_share: Share = 0.02  # learned: most requests that are placed to learn from them
    explore_slack_ms: Natural = 10_000  # learned: requests with less slack are not
    samples_min: Natural = 20  # learned: fewer observations of a part are too few
    # or prefill_first, decode_first, concurrent
    orchestration: Annotated[str, one_of(*ORCHESTRATIONS)] = "auto"
    reuse_tokens_min: Positive = 256  # auto: so much more KV on the decode worker: decode_first
    prefix_blocks_max: Positive = 1_000_000  # known KV blocks; the oldest go first
    queue_requests_max: Positive = 10_000  # waiting for admission; above it the worst are shed
    queue_tokens_max: Positive = 8_000_000  # prompt tokens waiting for admission; likewise
    ageing_ms: Positive = 5_000  # a waiting request rises one priority class per this time
    attempts_max: Positive = 3  # placements of one request that workers fail before it fails
    # workers that may be lost under one request, or have no room for it, before it fails
    losses_max: Positive = 12
    apply_tries_max: Positive = 3  # routers that may fail over one request before it fails
    handover_ahead: Natural = 4  # prefills dispatched beyond the free decode credits
    handover_margin_ms: Positive = 1_000  # a KV handle that expires sooner is not used
    # without a prefill worker for so long, decode workers compute prompts
    local_after_ms: Positive = 3_000
    # without a decode worker or replica for so long, a prefill worker decodes too; 0: never
    lends_after_ms: Natural = 5_000
    # how long after its deadline a worker may still end a request
    deadline_grace_ms: Positive = 5_000
    # so long after its gateway was lost, what nobody resumed ends
    gateway_grace_ms: Positive = 30_000
    assumed_prefill_tokens_per_s: Positive = 10_000  # for slack, where nothing is measured
    assumed_step_ms: Annotated[float, Field(ge=1)] = 10.0  # likewise, per token of the answer
    candidates_max: Positive = 4  # workers named in a decision
    sessions_max: Positive = 100_000  # remembered conversations; the least recently used go first
    session_ttl_ms: Positive = 3_600_000  # without a turn for so long, a conversation is forgotten
    retrievals_max: Positive = 1_000  # searches under way; above it requests go on without
    retrieval_grace_ms: Natural = 100  # what an answer of the last moment takes to be read back
    continues: bool = True  # what is placed again goes on where its answer stopped
    continue_wait_ms: Positive = 1_000  # for word of how much there is of it; then it begins anew
    # where a worker lacks so many tokens of what a prompt begins with, it computes them while the
    # rest is searched for; 0: never
    warm_tokens_min: Natural = 512
    # sessions whose passages are put in again in later turns; 0: none
    histories_max: Natural = 10_000
    histories_bytes_max: Positive = 64 << 20  # of these
    ended_max: Positive = 200_000  # remembered ids of ended requests
    early_cancels_max: Positive = 10_000  # cancellations read before their request
    tick_ms: Positive = 50
    journal_flush_ms: Positive = 200
    snapshot_ms: Positive = 600_000  # so often the journal has all state, for replays to begin at
    sends_pending_max: Positive = 10_000  # unacknowledged sends; above it the agents wait
    stall_exit_ms: Positive = 15_000  # lag without progress for so long ends the process

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

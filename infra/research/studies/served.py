"""Serves given conversations with one configuration, and sums the run up in a row.

Figures 4, 5 and 9 and real traffic are such rows; each study chooses conversations, configurations
and loads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from infra.planning import point
from infra.planning.point import Spec
from infra.simulator.traffic.script import SimConversation
from schemas.records import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRow:
    """One configuration at one load; times in ms, of completed turns; 0 where none completed.

    `later` figures are of turns after the first. `decode_ttft` is the time to the decode worker's
    first token, which is all that clients of plain runs see.
    """

    about: str  # the source of the conversations, the trace, or the model
    config: str
    load_per_s: float
    turns: int  # of each conversation; 0: it differs
    requests: int  # with those that were never sent
    sent_requests: int
    sent_later: int  # of these, after the first turn
    failed: int  # of all requests, with those never sent
    latency: float  # mean, from the prompt to the last token
    ttft_p50: float
    ttft_p99: float
    later_ttft: float  # mean
    later_ttft_p50: float
    decode_ttft: float  # mean, of later turns
    decode_ttft_p50: float
    decode_ttft_by_turn: list[float]  # from turn 2 to the last that any conversation completed
    tpot: float  # mean
    tpot_p99: float  # of answers with more than one token
    later_tpot: float  # mean
    local_share: float  # of later turns
    kv_bytes: int
    later_kv_bytes: int
    buffered_bytes: int  # most KV in a connector's buffer
    crashed: int  # workers whose buffer overflowed

    @property
    def losses(self) -> int:
        """Return the number of requests that were sent and failed."""
        return self.sent_requests - (self.requests - self.failed)


def serve(
    about: str,
    spec: Spec,
    conversations: Sequence[SimConversation],
    *,
    load_per_s: float = 0.0,
    turns: int = 0,
) -> ServedRow:
    """Serve the conversations to their ends; the workload of the spec is not used."""
    cluster = point.serve(spec, conversations)
    requests, moved_bytes = cluster.clients.requests, cluster.links.moved_bytes
    answers = [request for request in requests if request.completed]
    later = [answer for answer in answers if answer.turn > 1]
    request_count = sum(len(conversation.turns) for conversation in conversations)
    ttft, decode_ttft = [a.ttft_ms for a in answers], [a.decode_ttft_ms for a in later]
    by_turn = groupby(sorted(later, key=lambda a: a.turn), key=lambda a: a.turn)
    pressure = point.pressure(cluster)
    return ServedRow(
        about=about,
        config=spec.config.name,
        load_per_s=load_per_s,
        turns=turns,
        requests=request_count,
        sent_requests=len(requests),
        sent_later=sum(request.turn > 1 for request in requests),
        failed=request_count - len(answers),
        latency=_mean([answer.took_ms for answer in answers]),
        ttft_p50=_percentile(ttft, 50),
        ttft_p99=_percentile(ttft, 99),
        later_ttft=_mean([answer.ttft_ms for answer in later]),
        later_ttft_p50=_percentile([answer.ttft_ms for answer in later], 50),
        decode_ttft=_mean(decode_ttft),
        decode_ttft_p50=float(np.median(decode_ttft)) if decode_ttft else 0.0,
        decode_ttft_by_turn=[_mean([a.decode_ttft_ms for a in turn]) for _, turn in by_turn],
        tpot=_mean([answer.tpot_ms for answer in answers]),
        tpot_p99=_percentile([a.tpot_ms for a in answers if a.output_tokens > 1], 99),
        later_tpot=_mean([answer.tpot_ms for answer in later]),
        local_share=_mean([answer.mode is Mode.LOCAL for answer in later]),
        kv_bytes=sum(moved_bytes.values()),
        later_kv_bytes=sum(moved_bytes.get(r.request_id, 0) for r in requests if r.turn > 1),
        buffered_bytes=pressure["buffered_bytes"],
        crashed=pressure["crashed"],
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0

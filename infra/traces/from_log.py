"""Makes a trace of this deployment's own traffic: topics `requests` and `outcomes`, or a recording.

Of a prompt, only its length and its block ids are kept, numbered in order of first appearance;
sessions become numbers, too. Lengths, times and shared prefixes remain.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from infra.story.record_finder import CLOCKS_MS, LogFinder, Window
from infra.traces.recording import Recording, open_recording
from infra.traces.trace import BLOCK_TOKENS, Arrival, BlockIds, Trace, TraceBuilder
from schemas.prefix import chain
from schemas.records import Outcome, Request
from schemas.rules.outcomes import counting_outcomes
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from streams.log.registry import make_codec


async def read_log(
    log: LogSettings, since_ms: int, until_ms: int, block_tokens: int = BLOCK_TOKENS
) -> Trace:
    """Return the requests that arrived in that time. Raises TopicError, BrokerUnavailable."""
    finder = LogFinder(log, await asyncio.to_thread(make_codec, log))
    partitions = range(log.session_partitions)
    requests = await finder.find(
        "requests", partitions, "", Window(max(0, since_ms - CLOCKS_MS), until_ms + CLOCKS_MS)
    )
    outcomes = await finder.find(
        "outcomes", partitions, "", Window(max(0, since_ms - CLOCKS_MS), wall_ms() + CLOCKS_MS)
    )
    requests_by_id = {
        request.request_id: request
        for request in requests
        if isinstance(request, Request) and since_ms <= request.arrived_ms < until_ms
    }
    return trace_of(requests_by_id.values(), counting_outcomes(outcomes), block_tokens)


def read_recording(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Return the requests that arrived in a `trivium record` file's span; raises RecordError."""
    with open_recording(path) as recording:
        requests, outcomes = requests_in(recording)
    return trace_of(requests.values(), counting_outcomes(outcomes), block_tokens)


def requests_in(recording: Recording) -> tuple[dict[str, Request], list[Outcome]]:
    """Return the requests that arrived in a recording's span, by id, and all its outcomes."""
    requests: dict[str, Request] = {}
    outcomes: list[Outcome] = []
    since_ms, until_ms = recording.about["since_ms"], recording.about["until_ms"]
    for row in recording.rows():
        if row.topic == "outcomes":
            outcomes.append(recording.codec.decode(row.value))
        elif row.topic == "requests":  # a router's next incarnation may have it, too
            request = recording.codec.decode(row.value)
            if since_ms <= request.arrived_ms < until_ms:
                requests[request.request_id] = request
    return requests, outcomes


def trace_of(requests: Iterable[Request], ends: Mapping[str, Outcome], block_tokens: int) -> Trace:
    """Return a trace by arrival, without unfinished requests, whose lengths are unknown."""
    builder, blocks, sessions = TraceBuilder("log"), BlockIds(), BlockIds()
    inorder = sorted(requests, key=lambda request: (request.arrived_ms, request.request_id))
    began_ms = inorder[0].arrived_ms if inorder else 0
    for request in inorder:
        end = ends.get(request.request_id)
        if end is None:
            builder.left_out["requests without an outcome yet"] += 1
            continue
        ids = np.frombuffer(request.prompt_tokens, "<i4")
        (session,) = sessions.of([request.session_id])
        first_ms = end.first_token_ms - request.arrived_ms if end.first_token_ms else None
        builder.arrivals.append(
            Arrival(
                at_ms=float(request.arrived_ms - began_ms),
                prompt_tokens=len(ids),
                output_tokens=end.completion_tokens,
                blocks=blocks.of(_names(ids, block_tokens)),
                request_id=request.request_id,
                session_id=f"s{session}",
                model=request.model,
                priority=request.priority.value,
                ttft_ms=None if first_ms is None else float(max(0, first_ms)),
                total_ms=float(max(0, end.ended_ms - request.arrived_ms)),
            )
        )
    return builder.build(block_tokens=block_tokens, began_unix_ms=began_ms)


def _names(ids: "np.ndarray[tuple[int], np.dtype[np.int32]]", size: int) -> Sequence[object]:
    """Return a key per block: its prefix's hash, and the tokens of a partial one."""
    full = [("full", int(block_hash)) for block_hash in chain(ids, size)]
    tail = tuple(ids[len(full) * size :].tolist())
    return [*full, (tuple(full[-1:]), tail)] if tail else full

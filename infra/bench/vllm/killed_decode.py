"""Kills a decode worker on real vLLM during answers, and compares these with undisturbed ones.

Sends the same prompts at once three times: twice undisturbed, which shows how often answers differ
only by their batch, and once with the busier decode worker killed when a third of all tokens have
arrived. For an answer that differs, it reports the place and the gap between the two likeliest
tokens there. With a gap below `TIE`, the rounding of another batch can swap them.
"""

import asyncio
import signal
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from infra.bench.faults.http_clients import WHOLE, ClientAnswer
from infra.bench.faults.log_audit import LogAudit, read_topic
from infra.bench.results import Bar, at_least, at_most, median
from infra.bench.vllm.streams import NAME, StreamClient
from infra.stack.launcher import Stack
from schemas.records import Work
from schemas.rules.tokens import unpack_tokens

KILL_AT = 1 / 3  # share of all tokens
TIE = 0.001  # nats; float32 logits of this model differ by about 1e-5 between batches
BACK_S, PATIENCE_S = 240.0, 600.0
_LOOK_S = 0.02


async def ask_undisturbed(
    asker: StreamClient, prompts: Sequence[str], tokens: int
) -> list[ClientAnswer]:
    """Return the answers to all prompts, asked at once without a fault."""
    answers = [ClientAnswer(client=NAME) for _ in prompts]
    await asyncio.gather(*_streams(asker, prompts, tokens, answers))
    return answers


async def ask_with_kill(
    stack: Stack, asker: StreamClient, prompts: Sequence[str], tokens: int
) -> tuple[list[ClientAnswer], str]:
    """Ask all prompts and kill the busier decode worker; return the answers and its name."""
    answers = [ClientAnswer(client=NAME) for _ in prompts]
    asking = [asyncio.create_task(stream) for stream in _streams(asker, prompts, tokens, answers)]
    async with asyncio.timeout(PATIENCE_S):
        while sum(len(answer.token_ids) for answer in answers) < KILL_AT * tokens * len(prompts):
            if all(task.done() for task in asking):
                break
            await asyncio.sleep(_LOOK_S)
        name = _busier(stack)
        await stack.kill(name, signal.SIGKILL)
        await asyncio.gather(*asking)
    await stack.wait_ready(timeout_s=BACK_S)
    return answers, name


def _streams(
    asker: StreamClient, prompts: Sequence[str], tokens: int, answers: Sequence[ClientAnswer]
) -> list[Any]:
    pairs = zip(prompts, answers, strict=True)
    return [asker.stream(prompt, tokens, into=answer) for prompt, answer in pairs]


def _busier(stack: Stack) -> str:
    assert stack.fleet is not None
    loads = {
        name: member.load.running
        for name, member in stack.fleet.view.members.items()
        if name.startswith("decode-")
    }
    return max(sorted(loads), key=lambda name: loads[name])


async def read_prior_tokens(stack: Stack) -> dict[str, int]:
    """Return the number of prior tokens of each request that was dispatched again."""
    orders = [
        order for order in await read_topic(stack.settings.log, "decode") if type(order) is Work
    ]
    return {work.request_id: work.prior_tokens for work in orders if work.attempt > 1}


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return where two answers differ, or where the shorter one ends."""
    for place, (token, expected_token) in enumerate(zip(tokens, expected, strict=False)):
        if token != expected_token:
            return place
    return None if len(tokens) == len(expected) else min(len(tokens), len(expected))


async def differences(
    asker: StreamClient,
    answers: Sequence[ClientAnswer],
    expected: Sequence[ClientAnswer],
    audit: LogAudit,
) -> list[dict[str, Any]]:
    """Return each answer that is not as expected: the place, and the gap in nats there."""
    rows = []
    for number, (answer, right) in enumerate(zip(answers, expected, strict=True)):
        place = first_difference(answer.token_ids, right.token_ids)
        if place is None and answer.text == right.text:
            continue
        gap = None
        if place is not None and answer.status == WHOLE == right.status:
            prompt = [*unpack_tokens(audit.requests[answer.request_id].prompt_tokens)]
            gap = await asker.next_token_gap([*prompt, *answer.token_ids[:place]])
        rows.append({"prompt": number, "request": answer.request_id, "place": place, "gap": gap})
    return rows


def figures(
    answers: Sequence[ClientAnswer], prior_tokens: dict[str, int], apart: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return interruptions, pauses and differences of one round."""
    hit = [answer for answer in answers if answer.request_id in prior_tokens]
    pauses = [max(b - a for a, b in pairwise(answer.times_s)) for answer in hit]
    return {
        "answers": len(answers),
        "not_whole": [
            answer.detail or answer.status for answer in answers if answer.status != WHOLE
        ],
        "interrupted": len(hit),
        "gone_on_behind_tokens": sorted(prior_tokens[answer.request_id] for answer in hit),
        "pause_s_median": median(pauses),
        "pause_s_max": max(pauses, default=None),
        "different": list(apart),
        "different_beyond_ties": sum(row["gap"] is None or row["gap"] >= TIE for row in apart),
    }


def bars(row: dict[str, Any], violations: Sequence[str]) -> list[Bar]:
    """Return the bars of the round with the kill, and of the log after it."""
    return [
        at_least("kill: answers that were interrupted", row["interrupted"], 1),
        at_most("kill: answers that are not whole", len(row["not_whole"]), 0),
        at_most("kill: answers that differ from undisturbed ones", len(row["different"]), 0),
        at_most("rules of the log broken, as one outcome each", len(violations), 0),
    ]

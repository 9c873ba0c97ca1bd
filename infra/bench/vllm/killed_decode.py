"""A decode worker on real vLLM is killed with answers half done: do they end as undisturbed ones?

The same prompts are asked at once three times: twice undisturbed, which tells how often answers
differ by their batch alone, and once with the busier decode worker killed when a third of all
tokens has come. Where an answer differs, its place and the distance of the two likeliest tokens
there are told: below `TIE`, another batch's rounding can turn them round.
"""

import asyncio
import signal
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from infra.bench.faults.http_clients import WHOLE, Seen
from infra.bench.faults.log_audit import Audit, read_topic
from infra.bench.results import Bar, at_least, at_most, median
from infra.bench.vllm.streams import NAME, Asker
from infra.stack.launcher import Stack
from schemas.records import Work
from schemas.rules.tokens import unpack_tokens

KILL_AT = 1 / 3  # of all tokens
TIE = 0.001  # nats; float32 logits of this model differ by about 1e-5 between batches
BACK_S, PATIENCE_S = 240.0, 600.0
_LOOK_S = 0.02


async def undisturbed(asker: Asker, prompts: Sequence[str], tokens: int) -> list[Seen]:
    """Their answers, asked at once."""
    seen = [Seen(client=NAME) for _ in prompts]
    await asyncio.gather(*_asking(asker, prompts, tokens, seen))
    return seen


async def killed(
    stack: Stack, asker: Asker, prompts: Sequence[str], tokens: int
) -> tuple[list[Seen], str]:
    """The same with a kill; who was killed. Returns when that worker is back."""
    seen = [Seen(client=NAME) for _ in prompts]
    asking = [asyncio.create_task(each) for each in _asking(asker, prompts, tokens, seen)]
    async with asyncio.timeout(PATIENCE_S):
        while sum(len(each.token_ids) for each in seen) < KILL_AT * tokens * len(prompts):
            if all(each.done() for each in asking):
                break
            await asyncio.sleep(_LOOK_S)
        name = _busier(stack)
        await stack.kill(name, signal.SIGKILL)
        await asyncio.gather(*asking)
    await stack.wait_ready(timeout_s=BACK_S)
    return seen, name


def _asking(asker: Asker, prompts: Sequence[str], tokens: int, seen: Sequence[Seen]) -> list[Any]:
    pairs = zip(prompts, seen, strict=True)
    return [asker.stream(prompt, tokens, into=each) for prompt, each in pairs]


def _busier(stack: Stack) -> str:
    assert stack.fleet is not None
    loads = {
        name: member.load.running
        for name, member in stack.fleet.view.members.items()
        if name.startswith("decode-")
    }
    return max(sorted(loads), key=lambda name: loads[name])


async def said_before(stack: Stack) -> dict[str, int]:
    """How many tokens of an answer its last decode order goes on behind; of those with several."""
    orders = [each for each in await read_topic(stack.settings.log, "decode") if type(each) is Work]
    return {work.request_id: work.said for work in orders if work.attempt > 1}


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Of two answers; where one ends first, that place."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


async def differences(
    asker: Asker, found: Sequence[Seen], expected: Sequence[Seen], audit: Audit
) -> list[dict[str, Any]]:
    """Each answer that is not as expected: where, and how near the two likeliest tokens are."""
    told = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        place = first_difference(one.token_ids, other.token_ids)
        if place is None and one.text == other.text:
            continue
        gap = None
        if place is not None and one.ended == WHOLE == other.ended:
            prompt = [*unpack_tokens(audit.requests[one.request_id].prompt_tokens)]
            gap = await asker.next_token_gap([*prompt, *one.token_ids[:place]])
        told.append({"prompt": number, "request": one.request_id, "place": place, "gap": gap})
    return told


def figures(
    seen: Sequence[Seen], said: dict[str, int], apart: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Of one round."""
    hit = [each for each in seen if each.request_id in said]
    pauses = [max(b - a for a, b in pairwise(each.times_s)) for each in hit]
    return {
        "answers": len(seen),
        "not_whole": [each.detail or each.ended for each in seen if each.ended != WHOLE],
        "interrupted": len(hit),
        "gone_on_behind_tokens": sorted(said[each.request_id] for each in hit),
        "pause_s_median": median(pauses),
        "pause_s_max": max(pauses, default=None),
        "different": list(apart),
        "different_beyond_ties": sum(each["gap"] is None or each["gap"] >= TIE for each in apart),
    }


def bars(row: dict[str, Any], violations: Sequence[str]) -> list[Bar]:
    """What must hold of the round with the kill, and of the log after it."""
    return [
        at_least("kill: answers that were interrupted", row["interrupted"], 1, ""),
        at_most("kill: answers that are not whole", len(row["not_whole"]), 0, ""),
        at_most("kill: answers that differ from undisturbed ones", len(row["different"]), 0, ""),
        at_most("rules of the log broken, as one outcome each", len(violations), 0, ""),
    ]

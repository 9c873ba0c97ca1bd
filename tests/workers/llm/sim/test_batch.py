"""Draws of the batch: they depend on every byte of the KV, and on the seed."""

import numpy as np

from tests.workers.llm.sim.block_checks import block_manager
from workers.llm.sim.arena import KvArena
from workers.llm.sim.batch import BatchRow, RunningBatch

SIZE = 4


TOKENS = list(range(100, 120))


def sample_answer(
    tokens: list[int], count: int, *, seed: int = 0, spoiled: bool = False, prior_tokens: int = 0
) -> list[int]:
    """Answer tokens drawn from the KV of this prompt, whose last ones may be the answer's."""
    arena, manager = KvArena(16, SIZE, 16), block_manager(16)
    batch: RunningBatch[BatchRow] = RunningBatch(
        2, manager, arena, token_ids=[*range(200, 300), 7], end_every_tokens=0
    )
    digest = arena.digest(tokens)
    values = [*digest.chain, *([digest.tail] if digest.tail_tokens else [])]
    table = manager.open([], len(values), 16)
    assert table is not None
    arena.write(table.blocks, np.array(values, np.uint64))
    if spoiled:
        arena.regions[0].view(np.uint8)[table.blocks[0], 5] ^= 1
    row = BatchRow(
        table=table,
        prompt_tokens=len(tokens),
        limit=count,
        min_tokens=0,
        seed=seed,
        ignore_end=True,
        prior_tokens=prior_tokens,
    )
    batch.join(row)
    picks = []
    for _ in range(count - prior_tokens):
        step = batch.step()
        picks.append(200 + step.picks[0])
        batch.settle(step.due)
    return picks


def test_batch_continues_answer_like_fresh_prompt() -> None:
    """An answer's own blocks hold what a prompt of the same tokens would."""
    whole = sample_answer(TOKENS[:6], 12)
    for n in range(1, 12):
        assert sample_answer(TOKENS[:6] + whole[:n], 12 - n) == whole[n:]


def test_seeded_batch_continues_answer_after_prior_tokens() -> None:
    """Seeded sampling also depends on the position in the answer."""
    whole = sample_answer(TOKENS[:6], 12, seed=3)
    for n in range(1, 12):
        assert sample_answer(TOKENS[:6] + whole[:n], 12, seed=3, prior_tokens=n) == whole[n:]


def test_sampling_depends_on_kv_bytes_and_seed() -> None:
    prompt = TOKENS[:6]
    assert sample_answer(prompt, 8) == sample_answer(prompt, 8)
    assert sample_answer(prompt, 8, seed=3) == sample_answer(prompt, 8, seed=3)
    assert sample_answer(prompt, 8, seed=3) != sample_answer(prompt, 8, seed=5)
    assert sample_answer(prompt, 8) != sample_answer(prompt, 8, spoiled=True)

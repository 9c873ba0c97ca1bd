"""Draws of the batch: they depend on every byte of the KV, and on the seed."""

import numpy as np

from tests.workers.llm.sim.block_checks import block_manager
from workers.llm.sim.arena import KvArena
from workers.llm.sim.batch import BatchRow, RunningBatch

SIZE = 4


TOKENS = list(range(100, 120))


def drawn(
    tokens: list[int], count: int, *, seed: int = 0, spoiled: bool = False, said: int = 0
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
        prior_tokens=said,
    )
    batch.join(row)
    picks = []
    for _ in range(count - said):
        step = batch.step()
        picks.append(200 + step.picks[0])
        batch.settle(step.due)
    return picks


def test_going_on_equals_starting_over() -> None:
    """An answer's own blocks hold what a prompt of the same tokens would."""
    whole = drawn(TOKENS[:6], 12)
    for n in range(1, 12):
        assert drawn(TOKENS[:6] + whole[:n], 12 - n) == whole[n:]


def test_so_it_does_with_a_seed_where_the_answer_has_that_beginning() -> None:
    """What is drawn follows from the place in the answer, too."""
    whole = drawn(TOKENS[:6], 12, seed=3)
    for n in range(1, 12):
        assert drawn(TOKENS[:6] + whole[:n], 12, seed=3, said=n) == whole[n:]


def test_greedy_depends_on_bytes_only_and_seeds_differ() -> None:
    prompt = TOKENS[:6]
    assert drawn(prompt, 8) == drawn(prompt, 8)
    assert drawn(prompt, 8, seed=3) == drawn(prompt, 8, seed=3)
    assert drawn(prompt, 8, seed=3) != drawn(prompt, 8, seed=5)
    assert drawn(prompt, 8) != drawn(prompt, 8, spoiled=True)

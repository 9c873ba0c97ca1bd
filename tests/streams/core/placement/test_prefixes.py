"""The prefix index, by cases and against a naive model under lost, repeated and late batches."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fleet import Member
from schemas.prefix import chain, pack
from schemas.records import KvEvents, Role
from streams.core.events import KvEventsArrived
from streams.core.fleet.workers import Life, Worker, WorkerPool
from streams.core.placement import prefixes
from streams.core.placement.prefixes import SLOTS_MAX, PrefixIndex
from tests.streams import builders
from tests.streams.core.router_setups import replicas

BLOCK = 4


def hashes(*tokens: int) -> list[int]:
    block_hashes: list[int] = chain(tokens, BLOCK).tolist()
    return block_hashes


def events(worker_id: str, seq: int, **changes: Any) -> KvEvents:
    packed: dict[str, Any] = {
        name: pack(changes.pop(name)) for name in ("stored", "removed") if name in changes
    }
    values: dict[str, Any] = {"epoch": 1, "at_ms": 0, "block_size": BLOCK, **packed, **changes}
    return KvEvents(worker_id=worker_id, seq=seq, **values)


PROMPT = hashes(*range(100))  # 25 blocks


def two_workers() -> PrefixIndex:
    index = PrefixIndex(1_000)
    index.apply(events("a", 0, snapshot=True, stored=PROMPT[:10]))
    index.apply(events("b", 0, snapshot=True, stored=PROMPT))
    return index


def test_index_counts_blocks_of_each_worker() -> None:
    index = two_workers()
    assert index.depths(PROMPT, BLOCK) == {("a", 1): 10, ("b", 1): 25}
    assert index.depths(PROMPT[:1], BLOCK) == {("a", 1): 1, ("b", 1): 1}
    assert index.depths(hashes(*range(8)), BLOCK) == {("a", 1): 2, ("b", 1): 2}
    assert index.depths([], BLOCK) == index.depths(hashes(9, 9, 9, 9), BLOCK) == {}
    assert index.depths(PROMPT, 2 * BLOCK) == {}


def test_index_map_hashes_keeps_depths() -> None:
    """Each hash becomes one or more; the index itself is unchanged."""
    index = two_workers()
    copy = index.map_hashes(lambda value: (value + 1, value + 2))
    for offset in (1, 2):
        renamed = [value + offset for value in PROMPT]
        assert copy.depths(renamed, BLOCK) == {("a", 1): 10, ("b", 1): 25}
    assert not copy.depths(PROMPT, BLOCK)
    assert index.depths(PROMPT, BLOCK) == {("a", 1): 10, ("b", 1): 25}
    assert copy.block_sizes == (BLOCK,)


def test_index_rows_holding_match_depths() -> None:
    """This holds while slots are added."""
    index = PrefixIndex(1_000)
    joined = [builders.registration(f"w{number:02}", Role.REPLICA) for number in range(21)]
    members = [Member(registration=record, seen_ms=0) for record in joined]
    pool = WorkerPool(
        Worker(member.member_id, 1, Role.REPLICA, "tiny", "", 0, member) for member in members
    )
    for number in range(20):
        index.apply(events(f"w{number:02}", 0, snapshot=True, stored=PROMPT[: 1 + number % 5 * 6]))
        levels = index.levels_of(lambda _: PROMPT)
        depths = index.depths(PROMPT, BLOCK)
        expected = [BLOCK * depths.get(worker.life, 0) for worker in pool.workers]
        assert sum(count > 0 for count in expected) == number + 1
        for _ in range(2):
            row_tokens = np.zeros(len(expected))
            for tokens, rows in index.rows_holding(pool, levels):
                row_tokens[rows] = tokens
            assert row_tokens.tolist() == expected
            assert [index.held_by(worker, levels) for worker in pool.workers] == expected


def test_index_shares_blocks_of_system_prompt() -> None:
    system = list(range(40))
    index = PrefixIndex(1_000)
    index.apply(events("a", 0, snapshot=True, stored=hashes(*system, 1, 2, 3, 4)))
    index.apply(events("a", 1, stored=hashes(*system, 5, 6, 7, 8)))
    assert len(index) == 12
    assert index.depths(hashes(*system, 9, 9, 9, 9), BLOCK) == {("a", 1): 10}


def test_index_separates_block_sizes() -> None:
    index = two_workers()
    large = chain(range(100), 2 * BLOCK).tolist()
    index.apply(events("c", 0, block_size=2 * BLOCK, snapshot=True, stored=large))
    assert index.depths(large, 2 * BLOCK) == {("c", 1): 12}
    assert index.depths(PROMPT, BLOCK) == {("a", 1): 10, ("b", 1): 25}


def test_index_ignores_repeated_batches_and_awaits_snapshot_after_loss() -> None:
    index = two_workers()
    index.apply(events("a", 1, removed=PROMPT[5:10]))
    index.apply(events("a", 0, snapshot=True, stored=PROMPT[:10]))
    assert index.depths(PROMPT, BLOCK)["a", 1] == 5
    index.apply(events("a", 3, stored=PROMPT[5:6]))
    assert ("a", 1) not in index.depths(PROMPT, BLOCK)
    index.apply(events("a", 4, snapshot=True, has_more=True, stored=PROMPT[:3]))
    index.apply(events("a", 5, snapshot=True, stored=PROMPT[3:7]))
    assert index.depths(PROMPT, BLOCK)["a", 1] == 7
    index.apply(events("a", 6, snapshot=True, stored=PROMPT[:2]))
    assert index.depths(PROMPT, BLOCK)["a", 1] == 2


def test_index_starts_new_epoch_empty_and_ignores_old_one() -> None:
    index = two_workers()
    index.apply(events("a", 0, epoch=2, snapshot=True, stored=PROMPT[:1]))
    index.apply(events("a", 1, epoch=1, stored=PROMPT[10:]))
    assert index.depths(PROMPT, BLOCK) == {("a", 2): 1, ("b", 1): 25}
    assert index.slot(("a", 1)) == -1 != index.slot(("a", 2))


def test_index_drops_oldest_blocks_at_bound() -> None:
    index = PrefixIndex(40)
    index.apply(events("a", 0, snapshot=True, stored=PROMPT))
    index.apply(events("a", 1, stored=hashes(*range(500, 600))))
    assert len(index) <= 40
    assert index.depths(PROMPT, BLOCK) == {}
    assert index.depths(hashes(*range(500, 600)), BLOCK) == {("a", 1): 25}


def test_index_sweep_of_other_blocks_leaves_room_for_new_ones() -> None:
    index = PrefixIndex(8 * 25)  # of which 25 are swept at a time
    for seq, swept in enumerate((0, 0, 2, 0)):
        stored = hashes(*range(1_000 * seq, 1_000 * seq + 100))
        index.apply(events("a", seq, snapshot=not seq, stored=stored))
        index.sweep(swept)
        assert index.depths(stored, BLOCK) == {("a", 1): 25}
    assert len(index) == 100


def test_index_reuses_slots_after_sweep() -> None:
    index = two_workers()
    for epoch in range(2, 3 * SLOTS_MAX):
        index.apply(events("a", 0, epoch=epoch, snapshot=True, stored=PROMPT[:3]))
        index.sweep()
    assert index.depths(PROMPT, BLOCK) == {("a", epoch): 3, ("b", 1): 25}
    assert max(index.slot(("a", epoch)), index.slot(("b", 1))) < 16


def test_index_skips_worker_without_free_slot() -> None:
    index = PrefixIndex(100)
    for number in range(SLOTS_MAX + 1):
        index.apply(events(f"w{number}", 0, snapshot=True, stored=PROMPT[:1]))
    assert len(index.depths(PROMPT, BLOCK)) == SLOTS_MAX


def test_index_forgets_worker_with_oldest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "HOLDERS_MAX", 2)
    index = two_workers()
    index.apply(events("a", 1, removed=PROMPT[9:10]))
    index.apply(events("c", 0, snapshot=True, stored=PROMPT[:1]))
    assert index.depths(PROMPT, BLOCK) == {("a", 1): 9, ("c", 1): 1}


def test_router_forgets_blocks_of_silent_workers() -> None:
    on = replicas(1)
    on.apply(KvEventsArrived(events("x0", 0, snapshot=True, stored=PROMPT), 0))
    index = on.router.placer.prefixes
    assert index.depths(PROMPT, BLOCK) == {("x0", 1): 25}
    on.workers["x0"].silent = True
    for _ in range(10):
        on.now_ms += 61_000
        on.pass_ms(1_100)
    assert index.depths(PROMPT, BLOCK) == {}
    assert len(index) == 0


def test_index_never_overstates_many_distinct_depths() -> None:
    index = PrefixIndex(1_000)
    for number in range(1, 25):
        index.apply(events(f"w{number:02}", 0, snapshot=True, stored=PROMPT[:number]))
    depths = index.depths(PROMPT, BLOCK)
    assert len(depths) == 24
    for (worker_id, _), depth in depths.items():
        true = int(worker_id[1:])
        assert depth == true if true > 16 else 0 < depth <= true


def test_index_ignores_removal_of_blocks_that_worker_never_had() -> None:
    index = two_workers()
    index.apply(events("a", 1, removed=[*PROMPT[9:12], *hashes(7, 7, 7, 7)]))
    assert index.depths(PROMPT, BLOCK) == {("a", 1): 9, ("b", 1): 25}


def test_sweep_drops_blocks_without_holders() -> None:
    index = two_workers()
    index.apply(events("b", 1, removed=PROMPT))
    index.sweep(10)
    assert len(index) == 10


@dataclass
class Model:
    """One worker as it is, and what a listener that misses batches may know of it."""

    life: Life
    seq: int = 0
    blocks: set[int] = field(default_factory=set)
    untold: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    is_synced: bool = True


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "evict", "tell", "lose", "repeat", "snapshot", "restart"]),
        st.integers(0, 2),
        st.integers(0, 3),
        st.integers(1, 12),
    ),
    max_size=60,
)
PROMPTS = [hashes(*range(8), *range(100 * n, 100 * n + 40)) for n in range(4)]


class Run:
    """Plays steps on an index and on the model of it."""

    def __init__(self, blocks_max: int) -> None:
        self.index = PrefixIndex(blocks_max)
        self.workers = [Model((f"w{n}", 1)) for n in range(3)]
        self.last: dict[str, KvEvents] = {}
        for worker in self.workers:
            self.snapshot(worker, 12)

    def send(self, worker: Model, is_lost: bool = False, **changes: Any) -> None:
        record = events(worker.life[0], worker.seq, epoch=worker.life[1], **changes)
        worker.seq += 1
        worker.untold = (set(), set())
        if is_lost:
            worker.is_synced = False
            return
        self.last[worker.life[0]] = record
        self.index.apply(record)

    def snapshot(self, worker: Model, part: int) -> None:
        sorted_blocks = sorted(worker.blocks)
        parts = [sorted_blocks[i : i + part] for i in range(0, len(sorted_blocks), part)] or [[]]
        for number, blocks in enumerate(parts):
            has_more = number < len(parts) - 1
            self.send(worker, snapshot=True, has_more=has_more, stored=blocks)
        worker.is_synced = True

    def step(self, kind: str, number: int, prompt: int, count: int) -> None:
        worker, blocks = self.workers[number], PROMPTS[prompt]
        if kind in ("store", "evict"):
            was = set(worker.blocks)
            other_blocks = {b for p in PROMPTS if p is not blocks for b in p if b in was}
            prefix_blocks = set(blocks[:count]) | other_blocks
            worker.blocks = was | prefix_blocks if kind == "store" else prefix_blocks & was
            came, went = worker.blocks - was, was - worker.blocks
            worker.untold = (
                (worker.untold[0] - went) | (came - worker.untold[1]),
                (worker.untold[1] - came) | (went - worker.untold[0]),
            )
        elif kind in ("tell", "lose"):
            stored, removed = map(sorted, worker.untold)
            self.send(worker, kind == "lose", stored=stored, removed=removed)
        elif kind == "repeat":
            self.index.apply(self.last[worker.life[0]])
        elif kind == "snapshot":
            self.snapshot(worker, count)
        else:
            self.workers[number] = Model((worker.life[0], worker.life[1] + 1))
            self.snapshot(self.workers[number], 12)
        self.index.sweep()

    def reported_blocks(self, worker: Model) -> set[int]:
        stored, removed = worker.untold
        return (worker.blocks - stored) | removed

    def naive(self, prompt: list[int]) -> dict[Life, int]:
        depths = {}
        for worker in self.workers:
            blocks = self.reported_blocks(worker) if worker.is_synced else set()
            depth = next((i for i, b in enumerate(prompt) if b not in blocks), len(prompt))
            if depth:
                depths[worker.life] = depth
        return depths


@settings(max_examples=150)
@given(STEPS)
def test_index_matches_naive_model(steps: list[tuple[str, int, int, int]]) -> None:
    run = Run(blocks_max=10_000)
    for step in steps:
        # A lost batch is noticed at the next one; until then the index knows what it was told.
        run.step(*step)
        sure = {w.life for w in run.workers if w.is_synced}
        for prompt in PROMPTS:
            depths = {k: v for k, v in run.index.depths(prompt, BLOCK).items() if k in sure}
            assert depths == {k: v for k, v in run.naive(prompt).items() if k in sure}


@settings(max_examples=60)
@given(STEPS, st.integers(8, 40))
def test_index_with_bound_claims_no_more_than_naive_model(
    steps: list[tuple[str, int, int, int]], blocks_max: int
) -> None:
    run = Run(blocks_max)
    for step in steps:
        run.step(*step)
        assert len(run.index) <= blocks_max
        naive = {n: run.naive(p) for n, p in enumerate(PROMPTS)}
        for number, prompt in enumerate(PROMPTS):
            for life, depth in run.index.depths(prompt[:1], BLOCK).items():
                if any(w.life == life and w.is_synced for w in run.workers):
                    assert depth <= naive[number].get(life, 0)

"""The running batch of the simulated engine: a row per request; a step gives every row one token.

The state is in arrays, so a step costs a few vector operations, for any size of the batch. It
samples tokens, fills blocks, and returns the rows at an event. It has no clock, text or outputs
(`answers.py`). A row's token depends only on its own KV, seed and position, never on other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from schemas.prefix import STRIDE
from schemas.prefix import mix as mix_all
from workers.llm.sim.arena import FOLD, MASK, KvArena
from workers.llm.sim.blocks import BlockManager, BlockTable

_FOLD, _ONE = np.uint64(FOLD), np.uint64(1)
_S40 = np.uint64(40)
_FIELDS = (  # one array each: name, type
    ("folded", np.uint64),  # of all full blocks
    ("chain", np.uint64),  # hash of the last full block
    ("tail", np.uint64),  # sum of terms in the open block
    ("place", np.uint64),  # when mixed, the factor of the next token's term
    ("seed", np.uint64),  # 0: greedy
    ("drawn", np.int64),  # answer tokens so far
    ("event", np.int64),  # value of `drawn` at which the row has an event
    ("may_end", np.bool_),  # the end of sequence may be sampled
)


@dataclass(slots=True, kw_only=True)
class BatchRow:
    """A request in the batch; its state is read from the arena."""

    table: BlockTable
    prompt_tokens: int  # including the answer's prior tokens
    limit: int  # answer tokens at most
    min_tokens: int
    seed: int
    ignore_end: bool
    prior_tokens: int = 0  # the answer's tokens in the prompt
    script: Sequence[int] = ()  # tokens that replace sampled ones; at least `limit`


AnyRow = TypeVar("AnyRow", bound=BatchRow)


@dataclass(frozen=True, slots=True)
class StepDraws:
    """One step: vocabulary index and raw random number per row, and the rows at an event."""

    picks: list[int]
    raw: Any
    due: list[int]


class RunningBatch(Generic[AnyRow]):
    """Rows 0 to len-1, in no particular order: the last row takes the place of a removed one."""

    def __init__(
        self,
        capacity: int,
        blocks: BlockManager,
        arena: KvArena,
        *,
        token_ids: Sequence[int],  # tokens that may be sampled; the end of sequence is last
        end_every_tokens: int,
    ) -> None:
        self.rows: list[AnyRow] = []
        self._scripted = 0  # number of rows with a script, mostly 0
        self._blocks, self._arena = blocks, arena
        self._end = len(token_ids) - 1
        self._size = np.uint64(self._end)
        self._token_ids = np.array(token_ids, np.uint64)
        self._end_every = np.uint64(end_every_tokens)
        self._a: dict[str, Any] = {name: np.zeros(capacity, kind) for name, kind in _FIELDS}

    def __len__(self) -> int:
        return len(self.rows)

    def join(self, row: AnyRow) -> None:
        """Add a row; its state is read from the blocks of its table."""
        i, a = len(self.rows), self._a
        tail_tokens = row.prompt_tokens % self._arena.block_tokens
        state = self._arena.state(row.table.blocks, tail_tokens)
        a["folded"][i], a["chain"][i], a["tail"][i] = state
        a["place"][i] = (row.prompt_tokens + 1) * int(STRIDE) & MASK
        a["seed"][i], a["drawn"][i] = row.seed, row.prior_tokens
        a["may_end"][i] = not row.ignore_end and row.min_tokens <= row.prior_tokens
        self.rows.append(row)
        self._scripted += bool(row.script)
        if not tail_tokens:
            self._blocks.grow(row.table)  # the answer's first token opens a block
        a["event"][i] = self._next_event(row, row.prior_tokens)

    def leave(self, i: int) -> None:
        """Remove a row; the last one takes its place. The caller closes its table."""
        last = len(self.rows) - 1
        self._scripted -= bool(self.rows[i].script)
        self.rows[i] = self.rows[last]
        self.rows.pop()
        for column in self._a.values():
            column[i] = column[last]

    def token_count(self, i: int) -> int:
        """Return the number of answer tokens of a row so far."""
        return int(self._a["drawn"][i])

    def step(self, first: int = 0) -> StepDraws:
        """Sample one token for each row from `first` on."""
        a, rows = self._a, slice(first, len(self.rows))
        tail, token_counts, place = a["tail"][rows], a["drawn"][rows], a["place"][rows]
        token_counts += 1
        state = a["folded"][rows] + tail * _FOLD
        raw = mix_all(state ^ (a["seed"][rows] * token_counts.view(np.uint64)))
        picks = (raw % self._size).view(np.int64)
        due = token_counts >= a["event"][rows]
        if self._end_every:
            end_mask = ((raw >> _S40) % self._end_every == 0) & a["may_end"][rows]
            picks[end_mask] = self._end
            due |= end_mask
        token_ids = self._token_ids[picks]
        if self._scripted:
            for i, row in enumerate(self.rows[rows]):
                if row.script:
                    token_ids[i] = row.script[token_counts[i] - 1]
        tail += (token_ids + _ONE) * mix_all(place)
        place += STRIDE
        return StepDraws(picks.tolist(), raw, (np.flatnonzero(due) + first).tolist())

    def settle(self, due: list[int]) -> None:
        """Fill blocks that these rows completed, and set their next events; none has ended."""
        size, full = self._arena.block_tokens, []
        for i in due:
            row, token_count = self.rows[i], self.token_count(i)
            if not (row.prompt_tokens + token_count - row.prior_tokens) % size:
                full.append(i)
            if token_count >= row.min_tokens and not row.ignore_end:
                self._a["may_end"][i] = True
            self._a["event"][i] = self._next_event(row, token_count)
        if full:
            self._fill(np.array(full))

    def _fill(self, rows: Any) -> None:
        """Write completed blocks, read them back, fold them in, and open the next ones."""
        a, arena = self._a, self._arena
        tables = [self.rows[i].table for i in rows]
        ids = [table.blocks[-1] for table in tables]
        values = a["chain"][rows] + a["tail"][rows]
        arena.write(ids, values)
        contents = arena.read(ids)
        a["folded"][rows] = mix_all(a["folded"][rows] + contents * _FOLD)
        a["chain"][rows] = contents
        a["tail"][rows] = 0
        for table, block, value in zip(tables, ids, values.tolist(), strict=True):
            self._blocks.remember(block, value, table.salt)
            self._blocks.grow(table)

    def _next_event(self, row: AnyRow, token_count: int) -> int:
        size = self._arena.block_tokens
        filled = (row.prompt_tokens + token_count - row.prior_tokens) % size
        event = min(row.limit, token_count + size - filled)
        return min(event, row.min_tokens) if token_count < row.min_tokens else event

"""Filters of every kind against a plain look at each document.

Whatever came, was replaced, deleted, linked, compacted, or written to a file and read again.
"""

import json
import operator
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.vector.data import gaussian
from workers.vector.filters.filters import parse
from workers.vector.index import snapshot
from workers.vector.index.index import Index
from workers.vector.index.query import Effort

DIM, STEPS, FILTERS = 3, 14, 40
DATES = (
    "2023-12-31", "2024-01-01", "2024-01-01T00:00:00Z", "2024-01-01T00:30:00+01:00", "2024-06-01",
    "2024-06-01T12:00:00.5",
)  # fmt: skip
POOLS: dict[str, tuple[Any, ...]] = {
    "n": (0, 1, 2.5, -3, 10**6),
    "tag": ("a", "b", "c", "é", "2024-01-01"),
    "at": (*DATES, "soon", "2024-13-01"),
    "flag": (True, False, "maybe"),
}
EVERY = {"n": [0, 1], "tag": ["a", "b"], "at": list(DATES[:2]), "flag": True}  # always there
COMPARE: dict[str, Any] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


def random_metadata(chance: random.Random) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for field, pool in POOLS.items():
        match chance.randrange(4):
            case 0:
                metadata[field] = chance.choice(pool)
            case 1:
                metadata[field] = [chance.choice(pool) for _ in range(chance.randrange(5))]
    return metadata


def random_filter(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    if depth and chance.random() < 0.4:
        parts = [random_filter(chance, depth - 1) for _ in range(chance.randint(1, 3))]
        name = chance.choice(["$and", "$or", "$not"])
        return {name: parts[0] if name == "$not" else parts}
    field = chance.choice(list(POOLS))
    choice, choices = chance.choice(POOLS[field]), chance.sample(POOLS[field], chance.randint(1, 3))
    match chance.randrange(7):
        case 0:
            return {field: chance.choice([choice, None])}
        case 1:
            return {field: {chance.choice(["$eq", "$ne", "$contains"]): choice}}
        case 2:
            return {field: {chance.choice(["$in", "$nin", "$contains_any"]): choices}}
        case 3:
            return {field: {"$contains_all": choices}}
        case 4:
            return {field: {"$exists": chance.random() < 0.5}}
        case 5:
            return {"n": {name: chance.choice(POOLS["n"]) for name in ranges(chance)}}
        case _:
            at = chance.choice(["at", "tag", "flag"])
            return {at: {name: chance.choice(DATES) for name in ranges(chance)}}


def ranges(chance: random.Random) -> list[str]:
    return chance.sample(list(COMPARE), chance.randint(1, 2))


def moment(text: Any) -> float | None:
    try:
        time = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return None
    return (time if time.tzinfo else datetime.fromisoformat(f"{time}+00:00")).timestamp()


def holds(node: Any, metadata: dict[str, Any]) -> bool:
    """The meaning of a filter, written as plainly as can be."""
    for name, value in node.items():
        if name == "$and":
            is_met = all(holds(part, metadata) for part in value)
        elif name == "$or":
            is_met = any(holds(part, metadata) for part in value)
        elif name == "$not":
            is_met = not holds(value, metadata)
        else:
            field_value = metadata.get(name)
            values = (
                field_value
                if isinstance(field_value, list)
                else []
                if field_value is None
                else [field_value]
            )
            conditions = value if isinstance(value, dict) else {"$eq": value}
            is_met = all(fits(op, operand, values) for op, operand in conditions.items())
        if not is_met:
            return False
    return True


def fits(op: str, operand: Any, values: list[Any]) -> bool:
    def has(candidate: Any) -> bool:
        return any(type(candidate) is type(v) and candidate == v for v in map(plain, values))

    match op:
        case "$exists":
            return bool(values) is operand
        case "$eq" | "$contains":
            return not values if operand is None else has(plain(operand))
        case "$ne":
            return not has(plain(operand))
        case "$in" | "$contains_any":
            return any(has(plain(candidate)) for candidate in operand)
        case "$nin":
            return not any(has(plain(candidate)) for candidate in operand)
        case "$contains_all":
            return all(has(plain(candidate)) for candidate in operand)
    read = moment if isinstance(operand, str) else float
    edge = read(operand)
    numbers = [number for value in values if (number := read(value)) is not None]
    return any(COMPARE[op](number, edge) for number in numbers)


def plain(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


class CheckedIndex:
    """An index, and the same documents in a dictionary."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance, self.file = random.Random(seed), folder / "index"
        self.documents: dict[str, dict[str, Any]] = {}
        self.index = Index(DIM, degree=8, threads=1)
        self._put(["every"], [EVERY])

    def _put(self, names: list[str], metadata: list[dict[str, Any]]) -> None:
        vectors = gaussian(len(names), DIM, seed=self.chance.randrange(1 << 30))
        self.index.upsert(names, vectors, metadata)
        self.documents |= dict(zip(names, metadata, strict=True))

    def step(self) -> None:
        match self.chance.randrange(6):
            case 0 | 1 | 2:
                count = self.chance.randint(1, 60)
                names = [f"d{n}" for n in self.chance.sample(range(200), count)]
                self._put(names, [random_metadata(self.chance) for _ in names])
            case 3:
                deleted_names = [name for name in self.documents if self.chance.random() < 0.3]
                deleted_names = [name for name in deleted_names if name != "every"]
                self.index.delete(deleted_names)
                for name in deleted_names:
                    del self.documents[name]
            case 4:
                self.index.compact()
            case _:
                snapshot.save(self.index, self.file)
                self.index = snapshot.load(self.file, threads=1)

    def check(self, node: dict[str, Any]) -> None:
        expected = sorted(
            name for name, metadata in self.documents.items() if holds(node, metadata)
        )
        view = self.index.view()
        allowed = view.allowed(parse(json.dumps(node)))
        assert sorted(str(view.ids[row]) for row in allowed.rows) == expected, node
        rows, _ = self.index.search(
            np.zeros((1, DIM)), Effort(k=300, where=parse(json.dumps(node)))
        )
        ids = self.index.ids_of(rows[0][rows[0] >= 0])
        assert sorted(map(str, ids)) == expected, node


@pytest.mark.parametrize("seed", range(6))
def test_filter_allows_same_rows_as_plain_check(seed: int, tmp_path: Path) -> None:
    checked_index = CheckedIndex(seed, tmp_path)
    filters = [
        random_filter(checked_index.chance) for _ in range(FILTERS // 2)
    ]  # compiled once, then extended
    for _ in range(STEPS):
        checked_index.step()
        for node in (*filters, *(random_filter(checked_index.chance) for _ in range(FILTERS // 2))):
            checked_index.check(node)

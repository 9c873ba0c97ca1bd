"""Ids, payloads and labels of an index file, from and to what Python keeps of them.

Of an index of a million rows these are a million objects each. One call that takes them all holds
the interpreter's lock for tens of milliseconds, and with it the event loop; so they are taken in
parts.
"""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from workers.search.index.query import ExternalId
from workers.search.kernels.arrays import Array

_PART, _PAUSE_S = 2_000, 1e-4  # objects, about 0.3 ms


def packed_ids(ids: list[ExternalId], count: int) -> tuple[Array, Array]:
    """(kind and end of each id in a row of bytes): numbers are 8 bytes."""
    kinds = {int: 0, str: 1, bytes: 2}
    table = np.empty((2, count), np.int64)
    parts: list[bytes] = []
    for first, part in _in_turns(ids, count):
        table[0, first : first + len(part)] = [kinds[type(each)] for each in part]
        parts += [
            each.to_bytes(8, "little", signed=True)
            if isinstance(each, int)
            else each.encode()
            if isinstance(each, str)
            else each
            for each in part
        ]
    table[1], blob = joined(parts, count)
    return table, blob


def joined(parts: list[bytes], count: int) -> tuple[Array, Array]:
    """Where each of the first parts ends, int64, and all of their bytes, uint8."""
    lengths, pieces = np.zeros(count, np.int64), [np.empty(0, np.uint8)]
    for first, part in _in_turns(parts, count):
        lengths[first : first + len(part)] = [len(each) for each in part]
        pieces.append(np.frombuffer(b"".join(part), np.uint8))
    return np.cumsum(lengths), np.concatenate(pieces)


def labels_json(labels: Mapping[str, Mapping[str | bool, int]]) -> str:
    """Members of an object of lists."""
    lists = []
    for field, known in labels.items():
        each = list(known)
        texts = [json.dumps(part)[1:-1] for _, part in _in_turns(each, len(each))]
        lists.append(f"{json.dumps(field)}: [{', '.join(texts)}]")
    return ", ".join(lists)


def _in_turns(items: list[Any], count: int) -> Iterator[tuple[int, list[Any]]]:
    """The first items in parts, and where each begins; others get the interpreter in between."""
    for first in range(0, count, _PART):
        yield first, items[first : min(count, first + _PART)]
        time.sleep(_PAUSE_S)


def unpacked_ids(table: Array, blob: Array) -> list[ExternalId]:
    data, begin = blob.tobytes(), 0
    ids: list[ExternalId] = []
    for kind, end in table.T.tolist():
        part = data[begin:end]
        begin = end
        if kind == 0:
            ids.append(int.from_bytes(part, "little", signed=True))
        else:
            ids.append(part.decode() if kind == 1 else part)
    return ids


def unpacked_payloads(arrays: dict[str, Array]) -> list[bytes] | None:
    if "payload_ends" not in arrays:
        return None
    data, ends = arrays["payload_bytes"].tobytes(), arrays["payload_ends"].tolist()
    return [data[first:end] for first, end in zip([0, *ends], ends, strict=False)]

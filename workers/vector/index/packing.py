"""Converts ids, payloads and labels between Python objects and the arrays of an index file.

An index of a million rows has a million objects of each. A single call that processes all of them
would hold the interpreter's lock, and block the event loop, for tens of milliseconds; so they are
processed in parts.
"""

import json
from collections.abc import Mapping

import numpy as np

from workers.vector.filters.parts import in_parts
from workers.vector.index.query import ExternalId
from workers.vector.kernels.arrays import Array


def packed_ids(ids: list[ExternalId], count: int) -> tuple[Array, Array]:
    """Pack the first `count` ids: kinds and ends, int64 (2, count), and their bytes, uint8.

    Kinds are 0 for numbers, which have 8 bytes, 1 for str and 2 for bytes.
    """
    kinds = {int: 0, str: 1, bytes: 2}
    table = np.empty((2, count), np.int64)
    pieces = [np.empty(0, np.uint8)]
    for first, last in in_parts(count):
        part = ids[first:last]
        table[0, first:last] = [kinds[type(external)] for external in part]
        spelled = [
            external.to_bytes(8, "little", signed=True)
            if isinstance(external, int)
            else external.encode()
            if isinstance(external, str)
            else external
            for external in part
        ]
        table[1, first:last] = [len(id_bytes) for id_bytes in spelled]
        pieces.append(np.frombuffer(b"".join(spelled), np.uint8))
    table[1] = np.cumsum(table[1])
    return table, np.concatenate(pieces)


def joined(items: list[bytes], count: int) -> tuple[Array, Array]:
    """Join the first `count` items: return their ends, int64, and their bytes, uint8."""
    lengths, pieces = np.zeros(count, np.int64), [np.empty(0, np.uint8)]
    for first, last in in_parts(count):
        part = items[first:last]
        lengths[first:last] = [len(payload) for payload in part]
        pieces.append(np.frombuffer(b"".join(part), np.uint8))
    return np.cumsum(lengths), np.concatenate(pieces)


def labels_json(names: Mapping[str, list[str | bool]]) -> bytes:
    """Encode labels by field as the members of a JSON object of lists, in ASCII."""
    lists = []
    for field, labels in names.items():
        texts = [
            json.dumps(labels[first:last])[1:-1].encode() for first, last in in_parts(len(labels))
        ]
        lists.append(b"%s: [%s]" % (json.dumps(field).encode(), b", ".join(texts)))
    return b", ".join(lists)


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

"""Vectors as bytes, and shards of documents."""

import numpy as np
import pytest

from schemas.errors import InvalidVector, RecordError
from schemas.retrieval import pack_vector, shard_of, unpack_vector


def test_vectors_are_packed_as_little_endian_floats() -> None:
    assert pack_vector([1, -2.5]) == bytes.fromhex("0000803f000020c0")
    assert pack_vector(np.array([[1, -2.5]], np.float16)) == pack_vector([1, -2.5])
    assert unpack_vector(pack_vector([1, -2.5])).tolist() == [1, -2.5]
    with pytest.raises(RecordError, match="multiple of 4 bytes, found 5"):
        unpack_vector(b"12345")
    with pytest.raises(InvalidVector, match="expected numbers, found 'word'"):
        pack_vector("word")


def test_shard_of_document_is_stable() -> None:
    assert [shard_of(f"document-{i}", 3) for i in range(8)] == [2, 1, 1, 0, 1, 2, 1, 2]

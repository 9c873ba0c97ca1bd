"""The functions written from schemas give what a writer gives that walks them."""

import io
from dataclasses import replace
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import full_schema, schema_of, to_dict
from schemas.encoder import MISFITS, encoder_of, long_of
from tests.schemas.examples import LONG_MAX, RECORDS, example, instances

ENCODERS = {name: encoder_of(full_schema(name)) for name in RECORDS}


def walked(schema: Any, plain: Any) -> bytes:
    """The same body by fastavro."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, plain)
    return out.getvalue()


@given(st.data())
@settings(max_examples=500)
def test_bodies_are_those_of_a_writer_that_walks_the_schema(data: st.DataObject) -> None:
    """(issue 27, 3.1)"""
    name = data.draw(st.sampled_from(RECORDS))
    record = data.draw(instances(f"trivium.{name}"))
    assert ENCODERS[name](record) == walked(schema_of(name), to_dict(record))


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_of_every_record_is_written(name: str) -> None:
    record = example(f"trivium.{name}")
    assert ENCODERS[name](record) == walked(schema_of(name), to_dict(record))


@given(st.integers(-LONG_MAX - 1, LONG_MAX))
@settings(max_examples=300)
def test_longs(value: int) -> None:
    assert long_of(value) == walked({"type": "long"}, value)


@pytest.mark.parametrize("edge", [2**6, 2**13, 2**14, 2**20, 2**62, LONG_MAX])
def test_longs_at_the_edges_of_their_bytes(edge: int) -> None:
    for value in (edge - 1, edge, -edge, -edge - 1):
        assert long_of(value) == walked({"type": "long"}, value)


def test_numbers_and_bytes_of_other_libraries() -> None:
    """Engines bring theirs."""
    frame = replace(
        example("trivium.TokenFrame"), token_ids=np.array([1, 70_000]), at_ms=np.int64(1 << 40)
    )
    plain = replace(frame, token_ids=[1, 70_000], at_ms=1 << 40)
    assert ENCODERS["TokenFrame"](frame) == ENCODERS["TokenFrame"](plain)
    work = example("trivium.Work")
    viewed = replace(work, prompt_tokens=memoryview(work.prompt_tokens))
    assert ENCODERS["Work"](viewed) == ENCODERS["Work"](work)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Work", {"prompt_tokens": "text"}),
        ("Work", {"prompt_tokens": None}),
        ("Work", {"attempt": 1.5}),
        ("Work", {"attempt": None}),
        ("Work", {"sampling": "text"}),
        ("Request", {"priority": "no class"}),
        ("Request", {"w_ttft": "heavy"}),
        ("TokenFrame", {"token_ids": None}),
        ("TokenFrame", {"token_ids": 7}),
        ("TokenFrame", {"token_ids": ["text"]}),
        ("TokenFrame", {"token_ids": [LONG_MAX + 1]}),
        ("TokenFrame", {"texts": [None]}),
        ("TokenFrame", {"ends": ["text"]}),
    ],
)
def test_what_the_schema_refuses_is_not_written(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(MISFITS):
        ENCODERS[name](replace(example(f"trivium.{name}"), **changes))

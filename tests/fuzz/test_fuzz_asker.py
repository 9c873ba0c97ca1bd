"""What askers of the retrieval pool read, as nobody means it: hits, and what the fleet says. Only
what could be true is believed, and nobody is held up."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import NotReady, TriviumError
from schemas.log.retrieval.routes import EMBEDDING
from schemas.records import RetrievalRequest
from schemas.retrieval import pack_vector
from tests.fuzz.drawn import CODEC, examples, record_bytes
from tests.fuzz.test_fuzz_retrieval import FLOATS, IDS, KINDS, MANY, NUMBERS
from tests.schemas.examples import example, instances
from tests.schemas.log.retrieval.asked_pool import Pool, ask, asking, hits
from tests.stalls import unstalled


@pytest.mark.parametrize(("shard", "shards"), [(0, 0), (-1, 1), (1, 1), (0, 2**31 - 1), (0, -5)])
async def test_a_shard_that_cannot_be_is_asked_of_nothing(shard: int, shards: int) -> None:
    """Of 0 shards the answers never count; of 2**31 the asker never stops counting."""

    def answers(pool: Pool, _: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request))

    async with asking(1, answers) as (asker, pool):
        pool.register("forged", shard, shards)
        found = await unstalled(ask(asker, within_ms=60_000))
        assert found.shards == 1 and found.is_complete
    async with asking(0, answers) as (asker, pool):
        pool.register("forged", shard, shards)
        with pytest.raises(NotReady):
            await unstalled(ask(asker, within_ms=60_000))


FORGED_HITS = st.fixed_dictionaries(
    {},
    optional={
        "shard": NUMBERS,
        "shards": NUMBERS,
        "document_ids": st.lists(IDS, max_size=3),
        "distances": st.lists(FLOATS, max_size=3).map(pack_vector) | st.binary(max_size=9),
        "seeds": st.lists(IDS, max_size=2),
        "error": st.none() | instances("trivium.WireError"),
        "extends": NUMBERS,
        "took_ms": FLOATS,
    },
)


async def test_oversized_hits_hold_nobody_up() -> None:
    large = CODEC.encode(dataclasses.replace(example("trivium.Hits"), document_ids=[""] * MANY))

    def answers(pool: Pool, _: int, request: RetrievalRequest) -> None:
        pool.say(large)
        pool.answer(hits(request))

    async with asking(1, answers) as (asker, pool):
        found = await unstalled(ask(asker, within_ms=60_000))
        assert [hit.document_id for hit in found.hits] == ["a"] and len(pool.buried) == 1


@examples(120)
@given(st.lists(FORGED_HITS | record_bytes(KINDS) | st.binary(max_size=9), max_size=6))
async def test_an_asker_gets_its_answer_whatever_else_is_said(drawn: list[Any]) -> None:
    """Only what could be true of a shard is believed; all else is buried."""

    def answers(pool: Pool, _: int, request: RetrievalRequest) -> None:
        for each in drawn:
            if isinstance(each, dict):
                each = CODEC.encode(dataclasses.replace(hits(request), **each))
            pool.say(each)
        pool.answer(hits(request))

    async with asking(1, answers) as (asker, pool):
        try:
            found = await unstalled(ask(asker, within_ms=60_000))
        except TriviumError as error:
            assert any(isinstance(each, dict) and each.get("error") for each in drawn), error
            return
        assert len(found.hits) <= 10 and found.shards == 1
        assert all(np.isfinite(hit.distance) for hit in found.hits)
        json.dumps([hit.document_id for hit in found.hits])
        heard = asker._exchange._direct._heard_ms.keys()
        assert heard <= {(partition, who) for partition in (1, 3) for who in (0, EMBEDDING)}

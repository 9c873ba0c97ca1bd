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
from schemas.records import RetrievalRequest
from schemas.retrieval import pack_vector
from streams.log.retrieval.routes import EMBEDDING
from tests.fuzz.strategies import CODEC, examples, record_bytes
from tests.fuzz.test_fuzz_retrieval import FLOATS, IDS, KINDS, MANY, NUMBERS
from tests.loop_stalls import unstalled
from tests.schemas.examples import example, instances
from tests.streams.log.retrieval.pool_stub import Pool, ask, asking, hits


@pytest.mark.parametrize(("shard", "shards"), [(0, 0), (-1, 1), (1, 1), (0, 2**31 - 1), (0, -5)])
async def test_retrieval_client_ignores_impossible_shard(shard: int, shards: int) -> None:
    """With 0 shards no answer counts; with 2**31 the client never stops counting."""

    def answers(pool: Pool, _: int, request: RetrievalRequest) -> None:
        pool.answer(hits(request))

    async with asking(1, answers) as (asker, pool):
        pool.register("forged", shard, shards)
        result = await unstalled(ask(asker, within_ms=60_000))
        assert result.shards == 1 and result.is_complete
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


async def test_retrieval_client_dead_letters_oversized_hits() -> None:
    large = CODEC.encode(dataclasses.replace(example("trivium.Hits"), document_ids=[""] * MANY))

    def answers(pool: Pool, _: int, request: RetrievalRequest) -> None:
        pool.say(large)
        pool.answer(hits(request))

    async with asking(1, answers) as (asker, pool):
        result = await unstalled(ask(asker, within_ms=60_000))
        assert [hit.document_id for hit in result.hits] == ["a"] and len(pool.buried) == 1


@examples(120)
@given(st.lists(FORGED_HITS | record_bytes(KINDS) | st.binary(max_size=9), max_size=6))
async def test_retrieval_client_answers_despite_forged_records(forgeries: list[Any]) -> None:
    """The client believes only what could be true of a shard and dead-letters the rest."""

    def answers(pool: Pool, _: int, request: RetrievalRequest) -> None:
        for forgery in forgeries:
            if isinstance(forgery, dict):
                forgery = CODEC.encode(dataclasses.replace(hits(request), **forgery))
            pool.say(forgery)
        pool.answer(hits(request))

    async with asking(1, answers) as (asker, pool):
        try:
            result = await unstalled(ask(asker, within_ms=60_000))
        except TriviumError as error:
            assert any(
                isinstance(forgery, dict) and forgery.get("error") for forgery in forgeries
            ), error
            return
        assert len(result.hits) <= 10 and result.shards == 1
        assert all(np.isfinite(hit.distance) for hit in result.hits)
        json.dumps([hit.document_id for hit in result.hits])
        senders = asker._exchange._direct._heard_ms.keys()
        assert senders <= {(partition, who) for partition in (1, 3) for who in (0, EMBEDDING)}

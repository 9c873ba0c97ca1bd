"""What tests of engines share."""

from collections.abc import Iterator

import pytest

from tests.workers.llm.engine_pair import Pair, PullingPair
from tests.workers.llm.engines import ENGINES

_MARKS = {"vllm": [pytest.mark.vllm, pytest.mark.timeout(1_800)]}


@pytest.fixture(scope="session")
def pulling_pair(trivium_home: None) -> Iterator[PullingPair]:
    """One start of two vLLM engines for all modules; the last one's tests end them."""
    pair = PullingPair()
    yield pair
    pair.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=_MARKS.get(name, [])) for name in ENGINES],
)
def pair(request: pytest.FixtureRequest, pulling_pair: PullingPair) -> Iterator[Pair]:
    """Engines are shared by all tests of the module, and real ones with those of another."""
    if request.param == "vllm":
        shared = pulling_pair.get()
        yield Pair(shared.runner, shared.producer, shared.consumer)
        return
    found = Pair.started(ENGINES[request.param])
    yield found
    found.close()

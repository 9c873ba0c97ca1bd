"""What tests of engines share."""

from collections.abc import Iterator

import pytest

from tests.workers.llm.engine_pair import Pair, VllmPair, pulling, pushing
from tests.workers.llm.engines import ENGINES

_VLLM = [pytest.mark.vllm, pytest.mark.timeout(1_800)]
_MARKS = {"vllm": _VLLM, "vllm-push": _VLLM}


@pytest.fixture(scope="session")
def pulling_pair(trivium_home: None) -> Iterator[VllmPair]:
    """One start of two vLLM engines for all modules; the last one's tests end them."""
    pair = pulling()
    yield pair
    pair.close()


@pytest.fixture(scope="session")
def pushing_pair(trivium_home: None) -> Iterator[VllmPair]:
    """Likewise of two that push."""
    pair = pushing()
    yield pair
    pair.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=_MARKS.get(name, [])) for name in (*ENGINES, "vllm-push")],
)
def pair(
    request: pytest.FixtureRequest, pulling_pair: VllmPair, pushing_pair: VllmPair
) -> Iterator[Pair]:
    """Engines are shared by all tests of the module, and real ones with those of another."""
    real = {"vllm": pulling_pair, "vllm-push": pushing_pair}
    if request.param in real:
        shared = real[request.param].get()
        yield Pair(shared.runner, shared.producer, shared.consumer)
        return
    own_pair = Pair.started(ENGINES[request.param])
    yield own_pair
    own_pair.close()

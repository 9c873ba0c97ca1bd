"""What tests of engines share."""

from collections.abc import Iterator

import pytest

from tests.workers.llm.engine_pair import PullingPair


@pytest.fixture(scope="session")
def pulling_pair(trivium_home: None) -> Iterator[PullingPair]:
    """One start of two vLLM engines for all modules; the last one's tests end them."""
    pair = PullingPair()
    yield pair
    pair.close()

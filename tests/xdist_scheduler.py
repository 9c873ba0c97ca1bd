"""How tests are dealt to the processes of `make test`: whole files, whose tests share engines.

Whoever is done gets the next file, in the order of `conftest.py`.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_ONE_SCOPE = {  # by part of a test's path
    "vllm": "vllm",
    "workers/vector/": "vectors",
    "workers/retrieval/": "vectors",
    "bench/search/": "vectors",
}


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """All that starts vLLM counts as one file: two such at a time are slower than one by one. So
    does all that searches vectors: its kernels are compiled once, not in each process at a time."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by the number of tests, which tells no times

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((scope for part, scope in _ONE_SCOPE.items() if part in nodeid), file)

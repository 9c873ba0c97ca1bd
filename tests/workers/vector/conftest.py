"""The device that tests of the CUDA backend run on: emulated, and a real one where there is one.

Indexes of tests are small, and walked all the same; `test_nodes.py` is about those that are not.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.vector.cuda.emulator import COMPILER, EmulatedDevice
from workers.vector.cuda.device import Device
from workers.vector.index import view


@pytest.fixture(scope="session", autouse=True)
def walked() -> Iterator[None]:
    """No search measures all nodes because they are few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "NODES_MAX", 0)
        yield


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: Any) -> Iterator[Device]:
    """Fails a test after which memory beside an array is changed, where that can be seen."""
    if request.param == "emulated":
        if COMPILER is None:
            pytest.skip("the emulator of CUDA kernels needs a C++ compiler, and none is here")
        emulated = EmulatedDevice()
        yield emulated
        emulated.check()
        return
    from workers.vector.cuda.launch import CudaDevice, reason_against

    if (why := reason_against()) is not None:
        pytest.skip(why)
    yield CudaDevice()

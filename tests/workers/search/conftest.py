"""The device that tests of the CUDA backend run on: emulated, and a real one where there is one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.search.cuda.emulator import COMPILER, EmulatedDevice
from workers.search.cuda.device import Device


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
    from workers.search.cuda.launch import CudaDevice, reason_against

    if (why := reason_against()) is not None:
        pytest.skip(why)
    yield CudaDevice()

"""The CUDA source is compiled for real by NVRTC where that is installed; no device is needed."""

import ctypes
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest

from workers.search.cuda import layout
from workers.search.cuda.launch import OPTIONS

_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13")
REGISTERS_MAX = {"walk": 64}


@cache
def nvrtc() -> Any:
    """The library, or None."""
    for package in _PACKAGES:
        try:
            found = [Path(str(each.locate())) for each in files(package) or ()]
        except PackageNotFoundError:
            continue
        named = {path.name.split(".so")[0]: path for path in found if ".alt." not in path.name}
        if {"libnvrtc", "libnvrtc-builtins"} <= set(named):
            ctypes.CDLL(str(named["libnvrtc-builtins"]), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(named["libnvrtc"]))
    return None


def compiled(architecture: str) -> tuple[int, str, int]:
    """NVRTC's result, what it says, and the size of the machine code."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(
        ctypes.byref(program), layout.source().encode(), b"search.cu", 0, None, None
    )
    options = [f"--gpu-architecture={architecture}", *OPTIONS, "--ptxas-options=-v"]
    given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
    result = library.nvrtcCompileProgram(program, len(options), given)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return result, log.value.decode(), size.value


@pytest.mark.skipif(nvrtc() is None, reason="NVRTC, which compiles CUDA source, is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_every_kernel_compiles_without_spills(architecture: str) -> None:
    result, log, size = compiled(architecture)
    assert result == 0, log
    assert size > 0
    parts = log.split("Compiling entry function ")[1:]
    said = {part.split("'")[1]: part for part in parts}
    assert set(said) == set(layout.KERNELS)
    for kernel, part in said.items():
        frames = part.count("bytes stack frame")
        assert frames == part.count("0 bytes stack frame, 0 bytes spill stores") > 0, part
        registers = int(part.split("Used ")[1].split()[0])
        assert registers <= REGISTERS_MAX.get(kernel, 128), (kernel, registers)

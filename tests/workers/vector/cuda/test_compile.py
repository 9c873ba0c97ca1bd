"""The CUDA source is compiled for real by NVRTC where that is installed; no device is needed."""

import ctypes
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest

from workers.vector.cuda import layout
from workers.vector.cuda.launch import OPTIONS

_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13")
REGISTERS_MAX = {"walk": 64}


@cache
def nvrtc() -> Any:
    """The library, or None."""
    for package in _PACKAGES:
        try:
            paths = [Path(str(file.locate())) for file in files(package) or ()]
        except PackageNotFoundError:
            continue
        libraries = {path.name.split(".so")[0]: path for path in paths if ".alt." not in path.name}
        if {"libnvrtc", "libnvrtc-builtins"} <= set(libraries):
            ctypes.CDLL(str(libraries["libnvrtc-builtins"]), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(libraries["libnvrtc"]))
    return None


def compiled(architecture: str) -> tuple[int, str, int]:
    """NVRTC's result, what it says, and the size of the machine code."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(
        ctypes.byref(program), layout.source().encode(), b"search.cu", 0, None, None
    )
    options = [f"--gpu-architecture={architecture}", *OPTIONS, "--ptxas-options=-v"]
    c_options = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    result = library.nvrtcCompileProgram(program, len(options), c_options)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return result, log.value.decode(), size.value


@pytest.mark.skipif(nvrtc() is None, reason="NVRTC, which compiles CUDA source, is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernels_compile_without_spills(architecture: str) -> None:
    result, log, size = compiled(architecture)
    assert result == 0, log
    assert size > 0
    parts = log.split("Compiling entry function ")[1:]
    reports = {part.split("'")[1]: part for part in parts}
    assert set(reports) == set(layout.KERNELS)
    for kernel, part in reports.items():
        frames = part.count("bytes stack frame")
        assert frames == part.count("0 bytes stack frame, 0 bytes spill stores") > 0, part
        registers = int(part.split("Used ")[1].split()[0])
        assert registers <= REGISTERS_MAX.get(kernel, 128), (kernel, registers)

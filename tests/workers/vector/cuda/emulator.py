"""A device for tests that runs the CUDA kernels' own text on the CPU; `emulator.h` says how.

Memory has guards on both sides, which `check` looks at. Needs a C++ compiler.
"""

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from workers.vector.cuda import layout
from workers.vector.cuda.device import Launch

Array = np.ndarray[Any, Any]

COMPILER = shutil.which("g++") or shutil.which("clang++")
_GUARD, _ALIGNED = 256, 256
_FOLDER = Path(__file__).parents[4] / "build" / "emulator"
_OPTIONS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-ffp-contract=off", "-w"]
_BROKEN = {1: "a barrier that not all threads reach", 2: "shared memory beyond what is asked for"}


@cache
def library() -> ctypes.CDLL:
    """The kernels with the emulator around them, compiled once in a working tree: processes of one
    session wait for whoever comes first."""
    header = Path(__file__).with_name("emulator.h").read_text()
    calls = "\n".join(
        f"case {i}: return emulate((Kernel){name}, grid, threads, shared, to, n, order);"
        for i, name in enumerate(layout.KERNELS)
    )
    text = f"""{header}
{layout.source()}
extern "C" int run(int which, int grid, int threads, int shared, const void* to, int n,
                   unsigned order) {{
    switch (which) {{ {calls} }}
    return -1;
}}"""
    assert COMPILER is not None
    command = [COMPILER, *_OPTIONS]
    name = hashlib.sha256("\n".join([*command, text]).encode()).hexdigest()[:16]
    _FOLDER.mkdir(parents=True, exist_ok=True)
    built = _FOLDER / f"{name}.so"
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            for old in _FOLDER.glob("*.so"):
                old.unlink()
            _compile(command, text, built)
    return ctypes.CDLL(str(built))


def _compile(command: list[str], text: str, built: Path) -> None:
    source, whole = built.with_suffix(".cpp"), built.with_suffix(".part")
    source.write_text(text)
    command = [*command, str(source), "-o", str(whole)]
    compiler = subprocess.run(command, capture_output=True, text=True, check=False)
    source.unlink()
    assert compiler.returncode == 0, compiler.stderr
    whole.rename(built)


_KERNEL = threading.Lock()  # the emulator's own state is that of one kernel


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EmulatedMemory:
    """Host memory with guards."""

    room: Array
    first: int

    @property
    def address(self) -> int:
        return int(self.room.ctypes.data) + self.first


class EmulatedDevice:
    """Runs a graph when it is waited for, at the latest when another is launched.

    So copies, and what is done beside graphs, come before those under way: where that may not be
    seen, it is seen here.
    """

    multiprocessors = 2

    def __init__(self, order: int = 0) -> None:
        self.order = order
        self._alive: weakref.WeakSet[EmulatedMemory] = weakref.WeakSet()
        self._late: EmulatedEvent | None = None
        self.launches = 0

    def memory(self, size_bytes: int) -> EmulatedMemory:
        room = np.full(size_bytes + 2 * _GUARD + _ALIGNED, 0xCD, np.uint8)
        first = _GUARD + -(room.ctypes.data + _GUARD) % _ALIGNED
        room[first : first + size_bytes] = 0
        memory = EmulatedMemory(room, first)
        self._alive.add(memory)
        weakref.finalize(memory, check, room, first, size_bytes)
        return memory

    def pinned(self, size_bytes: int) -> Array:
        return np.zeros(size_bytes, np.uint8)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(target, source, size_bytes)

    def run_now(self, launch: Launch) -> None:
        self.run([launch])

    def graph(self, launches: Sequence[Launch]) -> "EmulatedGraph":
        return EmulatedGraph(self, tuple(launches))

    def finish(self) -> None:
        if self._late is not None:
            self._late.wait()

    def begin(self, event: "EmulatedEvent") -> None:
        self.finish()
        self._late = event

    def run(self, launches: Sequence[Launch]) -> None:
        for call in launches:
            self.launches += 1
            order = self.order and self.order + self.launches
            with _KERNEL:
                broken = library().run(
                    layout.KERNELS.index(call.kernel), call.grid, call.threads, call.shared_bytes,
                    ctypes.c_void_p(call.structure), call.number, order,
                )  # fmt: skip
            assert not broken, f"{call.kernel}: {_BROKEN.get(broken, broken)}"

    def check(self) -> None:
        """Fail where a kernel wrote beside its memory."""
        self.finish()
        for memory in list(self._alive):
            size = len(memory.room) - 2 * _GUARD - _ALIGNED
            check(memory.room, memory.first, size)


def check(room: Array, first: int, size_bytes: int) -> None:
    beside = np.concatenate([room[:first], room[first + size_bytes :]])
    assert (beside == 0xCD).all(), "a kernel wrote beside its memory"


@dataclass(frozen=True, slots=True)
class EmulatedGraph:
    device: EmulatedDevice
    launches: tuple[Launch, ...]

    def launch(self) -> "EmulatedEvent":
        event = EmulatedEvent(self.device, self.launches)
        self.device.begin(event)
        return event


@dataclass(slots=True)
class EmulatedEvent:
    device: EmulatedDevice
    launches: tuple[Launch, ...]

    def wait(self) -> None:
        launches, self.launches = self.launches, ()
        self.device.run(launches)

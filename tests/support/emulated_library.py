"""The C kernels compiled for 64-bit ARM and run by qemu's user emulation, called as if they were loaded here.

The library lives in a process of its own, which borrows this one's memory at the same addresses (``lent_memory.c``),
so tests call it with the arguments that they have anyway.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twofold.kernels.cpu.library import describe
from twofold.kernels.cpu.signatures import SIGNATURES

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
LIBC = Path("/usr/aarch64-linux-gnu")
_DRIVER = Path(__file__).with_name("lent_memory.c")
_CALL = struct.Struct("=64s24q8f")
# Heaps and mappings grow, stacks little: the two processes' must not lie nearer to each other than this.
_ROOM, _STACK_ROOM = 4 << 30, 16 << 20
_TRIES = 50


def unavailable() -> str | None:
    """None where ARM programs can be compiled and run, else what is missing."""
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)"
    return None if LIBC.exists() else f"no {LIBC} (Debian: libc6-dev-arm64-cross)"


def emulator() -> list[str]:
    """The command in front of a compiled program; the processor has every extension that qemu knows."""
    return [EMULATOR, "-cpu", "max", "-L", str(LIBC)]


def compile_driver(path: Path) -> None:
    """The program that calls a library for another process."""
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-rdynamic")
    subprocess.run([COMPILER, *flags, str(_DRIVER), "-o", str(path), "-ldl"], check=True, timeout=60)


class EmulatedLibrary(ctypes.CDLL):
    """Stands for a loaded library; its functions take and change this process's memory."""

    def __init__(self, driver: Path, library: Path) -> None:
        self._process = _start_apart(driver, library)

    def __getattr__(self, name: str) -> EmulatedFunction:
        if name not in SIGNATURES:
            raise AttributeError(name)
        function = EmulatedFunction(self, name)
        setattr(self, name, function)
        return function

    def call(self, name: str, integers: list[int], floats: list[float]) -> int:
        """The function's result; RuntimeError where the process has ended."""
        integers += [0] * (24 - len(integers))
        floats += [0.0] * (8 - len(floats))
        request, result = self._process.stdin, self._process.stdout
        assert request is not None and result is not None
        request.write(_CALL.pack(name.encode(), *integers, *floats))
        request.flush()
        answer = result.read(8)
        if len(answer) < 8:
            raise RuntimeError(f"{name} ended its process with status {self._process.wait(10)}")
        return int.from_bytes(answer, "little", signed=True)

    @property
    def pid(self) -> int:
        """Of the process that computes."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


class EmulatedFunction:
    """A function with ctypes' two attributes."""

    argtypes: list[type]
    restype: type | None

    def __init__(self, library: EmulatedLibrary, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *arguments: Any) -> int | None:
        integers: list[int] = []
        floats: list[float] = []
        for kind, value in zip(self.argtypes, arguments, strict=True):
            if kind is ctypes.c_float:
                floats.append(value)
            else:
                integers.append(_integer(value))
        result = self._library.call(self._name, integers, floats)
        return None if self.restype is None else result


def open_emulated(driver: Path, library: Path) -> EmulatedLibrary:
    """What ``library.open_library`` does for a library of this machine."""
    opened = EmulatedLibrary(driver, library)
    describe(opened)
    return opened


def _integer(value: Any) -> int:
    if value is None:
        return 0
    return ctypes.addressof(value) if isinstance(value, ctypes.Array) else int(value)


def _start_apart(driver: Path, library: Path) -> subprocess.Popen[bytes]:
    """Start the process until its own memory happens to lie where none of this one's is."""
    for _ in range(_TRIES):
        memory = os.open("/proc/self/mem", os.O_RDWR)
        command = [*emulator(), str(driver), str(library), str(memory)]
        process = subprocess.Popen(
            command, pass_fds=(memory,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1
        )
        os.close(memory)
        assert process.stdout is not None
        if len(process.stdout.read(8)) < 8:
            raise RuntimeError(f"{' '.join(command)} ended with status {process.wait(10)}")
        theirs = list(_areas(process.pid))
        if not any(first < b[1] and b[0] < last for first, last in _areas("self") for b in theirs):
            return process
        process.communicate(timeout=60)
    raise RuntimeError("the emulator always takes addresses that this process has taken: they are not random here")


def _areas(process: int | str) -> Iterator[tuple[int, int]]:
    """Where a process has memory, with room to grow; the kernel's own pages are not its memory."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if not line.endswith(("[vvar]", "[vdso]", "[vsyscall]")):
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            room = _STACK_ROOM if line.endswith("[stack]") else _ROOM
            yield first - room, last + room

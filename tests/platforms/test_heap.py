"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest
from twofold.platforms.heap import StepHeap, trim_heap

# Small blocks below one that stays: the C library by itself gives only the top of its heap back.
PROGRAM = """
import ctypes, re
from twofold.platforms.heap import trim_heap
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
blocks = []
for _ in range(20_000):
    block = library.malloc(4000)
    ctypes.memset(block, 1, 4000)
    blocks.append(block)
for block in blocks[:-1]:
    library.free(block)
before = resident()
trim_heap()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_blocks_under_a_used_one_go_back() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert int(output) > 60_000_000


def test_a_library_without_the_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    trim_heap()


def test_pages_go_back_when_steps_are_small_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step that left much, once the steps need less, but not in every second."""
    clock, given = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("twofold.platforms.heap.give_back_pages", lambda: given.append(clock[0]))
    heap = StepHeap()
    for num_tokens in (1, 100, 1, 1024, 300, 256, 12, 12):
        heap.stepped(num_tokens)
    assert given == [100.0]
    heap = StepHeap()
    assert [heap.stepped(num_tokens) for num_tokens in (1024, 257, 256, 255, 1)] == [False, False, True, False, False]
    heap.stepped(512)
    assert not heap.stepped(1)
    clock[0] += 11
    assert heap.stepped(1) and not heap.stepped(1)

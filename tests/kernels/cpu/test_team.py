"""The thread team: late and slow workers, several callers, nesting, fork; with and without futexes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from twofold.kernels.cpu import build, elementwise
from twofold.kernels.cpu.library import unavailable
from twofold.platforms import cpu_threads

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

FORKED = """
import os, torch
from twofold.kernels.cpu.elementwise import silu_and_mul
from twofold.platforms import cpu_threads
torch.set_num_threads(1)  # libgomp itself does not survive a fork
cpu_threads.set_num_threads(3)
x = torch.ones(64, 2048)
expected = silu_and_mul(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(silu_and_mul(x), expected) else 3)
print(os.waitpid(child, 0)[1])
"""


def check_program(path: Path, *flags: str) -> None:
    source = Path(__file__).with_name("team_check.c")
    include = Path(build.__file__).parent
    command = [*build.find_compiler(), "-std=gnu11", "-O2", "-pthread", f"-I{include}", *flags, str(source)]
    subprocess.run([*command, "-o", str(path)], check=True, timeout=60)
    result = subprocess.run([str(path)], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("flags", [(), ("-DTWOFOLD_NO_FUTEX",)], ids=["futex", "condition"])
def test_late_and_slow_workers_many_callers_fork(tmp_path, flags):
    check_program(tmp_path / "team", *flags)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-DTWOFOLD_NO_FUTEX",)], ids=["futex", "condition"])
@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_sanitizers(tmp_path, flags, sanitizer):
    check_program(tmp_path / "team", *flags, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g")


def test_a_forked_python_process_computes_and_ends():
    result = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "0\n"), result.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_threads_are_made_once():
    x = torch.ones(512, 2048)
    elementwise.silu_and_mul(x)
    before = len(os.listdir("/proc/self/task"))
    for count in (2, 3, 1, 3):
        cpu_threads.set_num_threads(count)
        elementwise.silu_and_mul(x)
    assert len(os.listdir("/proc/self/task")) == before

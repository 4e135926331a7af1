"""Where the C threads run, and where pages of weights lie, as the kernel itself tells."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, pathlib, re, sys, threading
import torch
from twofold.kernels.cpu import weight_memory
from twofold.kernels.cpu.library import functions
from twofold.platforms import cpu_threads

def masks():
    found = {}
    for thread in pathlib.Path("/proc/self/task").iterdir():
        try:
            text = (thread / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended since the listing
            continue
        found[int(thread.name)] = re.search(r"Cpus_allowed_list:\\s+(\\S+)", text)[1]
    return found

def work():
    x = torch.ones(4096, 4096)
    functions.twofold_scale(x.data_ptr(), x.numel(), 2.0, x.data_ptr())
    assert (x == 2).all()

allowed = sorted(os.sched_getaffinity(0))
cpu = allowed[-1]
cpu_threads.set_num_threads(3)
torch.set_num_threads(1)
before = set(masks())
cpu_threads.set_team_cpus((allowed[0], cpu, cpu), rest=allowed)
work()
workers = sorted(set(masks()) - before)
assert len(workers) == 2, workers
assert [masks()[worker] for worker in workers] == [str(cpu)] * 2, masks()
main = masks()[os.getpid()]
assert os.sched_getaffinity(0) == set(allowed), "the caller is left alone"
cpu_threads.set_team_cpus((cpu, allowed[0], allowed[0]))
work()
assert [masks()[worker] for worker in workers] == [str(allowed[0])] * 2, masks()
cpu_threads.set_team_cpus(())
work()
assert [masks()[worker] for worker in workers] == [main] * 2, masks()

cpu_threads.set_team_cpus((cpu,), rest=[allowed[0]])
cpu_threads.keep_thread_to(cpu_threads.team_cpus())
assert os.sched_getaffinity(0) == {cpu}
seen = []
thread = threading.Thread(target=lambda: (cpu_threads.leave_team(), seen.append(os.sched_getaffinity(0))))
thread.start(), thread.join()
assert seen == [{allowed[0]}], seen
cpu_threads.keep_thread_to([])
assert os.sched_getaffinity(0) == {cpu}, "no CPUs: nothing changes"
cpu_threads.keep_process_to(allowed)
assert set(masks().values()) == {main}, masks()

maps = pathlib.Path("/proc/self/numa_maps")
if maps.exists():
    cpu_threads.spread_over((0,))
    area = weight_memory.empty((64 << 20,), torch.uint8).fill_(1)
    assert "interleave:0" in maps.read_text() and area[0] == 1
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_threads_and_pages_go_where_they_are_told() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert result.stdout == "fine\n", result.stderr

"""Compiling on first use: the key, two processes at once, no compiler, other targets, sanitizers."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from twofold.kernels.cpu import build, library
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import KVWriteProblem, PlainProblem
from twofold.platforms import select_platform


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Path:
    """A compiler that writes empty files at once and counts its calls."""
    script = tmp_path / "fake cc"
    script.write_text(f"""#!/bin/sh
echo "$@" >> '{tmp_path}/calls'
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
""")
    script.chmod(0o755)
    monkeypatch.setenv("CC", f"'{script}'")
    return tmp_path / "calls"


def num_compilations(calls: Path) -> int:
    return sum("-shared" in line for line in calls.read_text().splitlines())


def test_compiled_once_per_flags_and_sources(cache, compiler, monkeypatch):
    first = build.library_path()
    assert first.parent == cache and first.exists()
    assert build.library_path() == first
    assert num_compilations(compiler) == 1
    assert build.library_path(extra_flags=("-DX",)) != first
    monkeypatch.setattr(build, "sources", lambda: [])
    assert build.library_path() != first
    assert not [path for path in cache.iterdir() if path.is_dir()], "a temporary folder was left behind"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_library_is_compiled_again(cache, compiler, caplog, damage):
    script = Path(shlex.split(os.environ["CC"])[0])
    script.write_text(script.read_text().replace(": >", "echo library >"))
    path = build.library_path()
    whole = path.read_bytes()
    assert whole.startswith(b"library\n")
    path.write_bytes({"cut": whole[:-5], "flipped": b"L" + whole[1:], "empty": b""}[damage])
    with caplog.at_level("WARNING"):
        assert build.library_path() == path
    assert path.read_bytes() == whole and num_compilations(compiler) == 2
    assert f"{path} is damaged" in caplog.text


def test_a_failing_compiler_is_quoted(cache, tmp_path, monkeypatch):
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho 'x.c:1:2: error: no such luck' >&2; exit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(build.BuildError, match="error: no such luck"):
        build.library_path()
    assert not cache.exists()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_compilers_end_with_the_process(cache, tmp_path, monkeypatch, number):
    """A driver and its child, as gcc and cc1: both go, and the folder that they wrote into."""
    script = tmp_path / "cc"
    script.write_text(
        f"#!/bin/sh\n[ \"$1\" = --version ] && exit 0\nsleep 600 &\necho $$ $! >> '{tmp_path}/pids'\nwait\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    code = "from twofold.kernels.cpu import build; build.library_path()"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    lines = tmp_path / "pids"
    count = build.num_processors()
    until(lambda: lines.exists() and len(lines.read_text().splitlines()) == count)
    pids = [int(word) for word in lines.read_text().split()]
    assert all(map(alive, pids))
    process.send_signal(number)
    process.wait(60)
    until(lambda: not any(map(alive, pids)) and not list(cache.glob("build-*")))


def test_stale_folders_go(cache, compiler):
    for name in ("build-old", "build-new"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / "build-old", (0, 0))
    build.library_path()
    assert [path.name for path in cache.glob("build-*")] == ["build-new"]


@pytest.mark.parametrize(("allowed", "quota", "room"), [(3, None, 3), (8, 2.5, 3), (1, 0.3, 1)])
def test_no_more_compilers_at_once_than_processors(cache, tmp_path, monkeypatch, allowed, quota, room):
    """Each notes down its beginning and its end, and the first ones wait (10 s at most) until as many as may run do."""
    script = tmp_path / "cc"
    script.write_text(f"""#!/bin/sh
[ "$1" = --version ] && exit 0
echo 1 >> '{tmp_path}/running'
tries=200
while [ $(grep -c '^1' '{tmp_path}/running') -lt {room} ] && [ $tries -gt 0 ]; do sleep 0.05; tries=$((tries - 1)); done
echo -1 >> '{tmp_path}/running'
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
""")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(build, "allowed_cpus", lambda: frozenset(range(allowed)))
    monkeypatch.setattr(build, "cpu_quota", lambda: quota)
    build.library_path()
    changes = [int(line) for line in (tmp_path / "running").read_text().splitlines()]
    assert len(changes) == 2 * (len(build.sources()) + 2)
    assert max(itertools.accumulate(changes)) == room


def test_the_slowest_files_come_first(cache, compiler, monkeypatch):
    """One compiler at a time: those that run at once note down their files in any order."""
    monkeypatch.setattr(build, "num_processors", lambda: 1)
    build.library_path()
    lines = compiler.read_text().splitlines()
    compiled = [Path(word).name for line in lines for word in line.split() if word.endswith(".c")]
    assert sorted(compiled) == sorted([*(path.name for path in build.sources()), "tape_calls.c"])
    assert tuple(compiled[: len(build._SLOWEST)]) == build._SLOWEST


def test_a_failing_compiler_is_called_no_more(cache, tmp_path, monkeypatch):
    script = tmp_path / "cc"
    script.write_text(f"#!/bin/sh\n[ $1 = --version ] || echo >> '{tmp_path}/calls'\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(build.BuildError, match="no message"):
        build.library_path()
    assert len((tmp_path / "calls").read_text().splitlines()) <= build.num_processors() < len(build.sources())


def test_a_compiler_that_takes_too_long(cache, tmp_path, monkeypatch):
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\nsleep 600\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.5)
    with pytest.raises(build.BuildError, match=r"timed out after 0\.5 seconds"):
        build.library_path()


def test_others_wait_for_the_one_that_compiles(cache, compiler):
    code = "from twofold.kernels.cpu import build; build.library_path()"
    slow = Path(shlex.split(os.environ["CC"])[0])
    slow.write_text(slow.read_text() + "sleep 1\n")
    jobs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [job.wait(120) for job in jobs] == [0, 0, 0]
    assert num_compilations(compiler) == 1
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks(cache, compiler, monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert build.library_path().exists()


@pytest.mark.parametrize("place", ["file", "/proc/twofold", "~no-such-user-here"])
def test_a_cache_that_cannot_be_written(compiler, tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWOFOLD_CACHE", place if place[0] in "~/" else str(tmp_path / place))
    with pytest.raises(build.BuildError, match="set TWOFOLD_CACHE"):
        build.library_path()


def test_without_a_compiler_torch_takes_over_with_one_log_line(monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(build.BuildError, match="'/nowhere/cc' that CC names"):
        build.find_compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    library.load.cache_clear()
    warnings: list[str] = []
    monkeypatch.setattr(library, "logger", SimpleNamespace(warning=lambda text, *args: warnings.append(text % args)))
    kernels = KernelSet(select_platform("cpu").spec)
    for op in ("rms_norm", "rope"):
        kernels.select(op, PlainProblem(torch.float32))
    kernels.select("write_kv", KVWriteProblem(dtype=torch.float32, kv_dtype=torch.float32))
    library.load.cache_clear()
    assert [row["kernel"] for row in kernels.report()] == ["torch"] * 3
    assert "no C compiler found (looked for cc, gcc and clang" in kernels.report()[0]["refused"]
    assert len(warnings) == 1 and "using torch's slower operations: no C compiler found" in warnings[0]


def run_checks(path: Path, *, preload: str = "") -> None:
    """A small check of every kernel of one library, in a process of its own."""
    environment = dict(os.environ, ASAN_OPTIONS="detect_leaks=0", OMP_NUM_THREADS="2")
    if preload:
        environment["LD_PRELOAD"] = preload
    script = Path(__file__).parents[2] / "support" / "check_cpu_library.py"
    result = subprocess.run([sys.executable, str(script), str(path)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.skipif(library.unavailable() is not None, reason="no compiled kernels")
def test_two_processes_at_once(cache):
    code = "from twofold.kernels.cpu.library import unavailable; import sys; sys.exit(unavailable() is not None)"
    jobs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [job.wait(timeout=300) for job in jobs] == [0, 0]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.skipif(library.unavailable() is not None, reason="no compiled kernels")
@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "native"])
def test_narrower_targets_compute_the_same(cache, target):
    if not select_platform("cpu").spec.arch.startswith("x86-64-v"):
        pytest.skip("x86 targets")
    run_checks(build.library_path(native=False, extra_flags=(f"-march={target}",)))


@pytest.mark.slow
@pytest.mark.skipif(library.unavailable() is not None, reason="no compiled kernels")
@pytest.mark.parametrize(("sanitizer", "runtime"), [("address", "libasan.so"), ("undefined", "libubsan.so")])
def test_sanitizers_are_clean(cache, sanitizer, runtime):
    command = [*build.find_compiler(), f"-print-file-name={runtime}"]
    preload = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(preload).is_absolute():
        pytest.skip(f"the compiler has no {runtime}")
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g")
    run_checks(build.library_path(extra_flags=flags), preload=preload)

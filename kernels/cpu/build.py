"""Compile the C kernels for exactly this processor, once, and keep the result in the cache folder.

The key covers the sources, the flags, the compiler and the processor, so a changed machine or version compiles anew.
One process compiles and the others wait for it, as far as the file system has locks; each works in its own temporary
folder and renames the finished library into place. A library ends with a digest of itself: one that a full disk or a
crash cut short would kill the process that maps it, so it is compiled again.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from ... import env, storage
from ...errors import ConfigError, TwofoldError
from ...log import get_logger
from ...platforms.cgroup import cpu_quota
from ...platforms.cpu_info import allowed_cpus, cpu_info
from .compiler_guard import CompilerGuard
from .signatures import tape_calls_source

logger = get_logger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-ftree-vectorize",
    # Passes that took a third of the compiler's time and did nothing for loops written in vectors.
    "-fno-tree-pre",
    "-fno-gcse",
    "-fno-ivopts",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-pthread",
    "-Wno-psabi",
)
# What takes longest is compiled first, so that the processors end together.
_SLOWEST = ("linear_low_bit.c", "int8_panels.c", "attention_floats.c", "linear.c", "int8_tiles.c")
_TIMEOUT_S = 300
# How long one compiler is listened to before the next one's turn.
_LISTEN_S = 0.01
# What a library ends with, behind all that the loader reads: the digest of the bytes before.
_SEAL_BYTES = hashlib.sha256().digest_size
# A build folder older than this was left behind by a process that was killed.
_STALE_S = 3600


class BuildError(TwofoldError):
    """The kernels cannot be compiled here; the message says why."""


def library_path(*, extra_flags: tuple[str, ...] = (), native: bool = True) -> Path:
    """Path of the compiled library, compiling it first where needed. Raises BuildError.

    ``extra_flags`` go last (sanitizers, another target level); without ``native`` the compiler's default target
    is used.
    """
    compiler = find_compiler()
    flags = (*_FLAGS, *(_native_flags() if native else ()), *extra_flags)
    try:
        target = env.cache_dir() / "kernels" / f"cpu-{_key(compiler, flags)}.so"
    except ConfigError as error:
        raise BuildError(str(error)) from None
    _remove_stale(target.parent)
    if not _is_whole(target):
        _compile(compiler, flags, target)
    return target


def find_compiler() -> list[str]:
    """The C compiler's command: the CC variable, else the first of cc, gcc and clang on the path."""
    chosen = env.compiler()
    if chosen:
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise BuildError(f"the C compiler {command[0]!r} that CC names is not there")
        return command
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C compiler found (looked for cc, gcc and clang; install one or set CC)")


def sources() -> list[Path]:
    """The C files, in a fixed order."""
    return sorted(_SOURCES.glob("*.c"))


def _native_flags() -> tuple[str, ...]:
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)


def _key(compiler: list[str], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(b"sealed")
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    for part in (shlex.join(compiler).encode(), version, shlex.join(flags).encode(), cpu_info().fingerprint().encode()):
        digest.update(part + b"\0")
    for path in (*sources(), *sorted(_SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(tape_calls_source().encode())
    return digest.hexdigest()[:24]


def _is_whole(library: Path) -> bool:
    """Whether a library is there, can be read and ends with its own digest."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_SEAL_BYTES]).digest() == content[-_SEAL_BYTES:]


def _seal(library: Path) -> None:
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as stream:
        stream.write(digest)


def _compile(compiler: list[str], flags: tuple[str, ...], target: Path) -> None:
    lock = target.with_suffix(".lock")
    try:
        with storage.writing(target.parent), storage.turn(lock, target, _TIMEOUT_S, lambda: _is_whole(target)):
            if not _is_whole(target):
                if target.exists():
                    logger.warning("%s is damaged and is compiled again", target)
                _compile_now(compiler, flags, target)
    except storage.StorageError as error:
        raise BuildError(str(error)) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the CPU kernels could not be compiled into {target.parent}: {error}") from error


def _compile_now(compiler: list[str], flags: tuple[str, ...], target: Path) -> None:
    start = time.monotonic()
    logger.info("compiling the CPU kernels for %s, once for this processor", cpu_info().arch)
    # Where the block fails, the guard removes the folder too.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        library = folder / "library.so"
        with CompilerGuard(folder) as guard:
            objects = _compile_objects(guard, compiler, flags, folder)
            _finish(guard, [[*compiler, *flags, "-shared", *map(str, objects), "-o", str(library), "-lm"]])
            _seal(library)
            os.replace(library, target)
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - start)


def _compile_objects(guard: CompilerGuard, compiler: list[str], flags: tuple[str, ...], folder: Path) -> list[Path]:
    generated = folder / "tape_calls.c"
    generated.write_text(tape_calls_source())
    slowest = [_SOURCES / name for name in _SLOWEST]
    files = [
        *(path for path in slowest if path in sources()),
        *(path for path in sources() if path not in slowest),
        generated,
    ]
    objects = [folder / f"{source.stem}.o" for source in files]
    prefix = [*compiler, *flags, "-I", str(_SOURCES), "-c"]
    pairs = zip(files, objects, strict=True)
    _finish(guard, [[*prefix, str(source), "-o", str(output)] for source, output in pairs])
    return objects


def _finish(guard: CompilerGuard, commands: list[list[str]]) -> None:
    """All ``commands`` in their order, one process each, as many at once as there are processors; each may take
    ``_TIMEOUT_S``. BuildError where one fails, which leaves the others to the guard.
    """
    left, running, room = deque(commands), deque[tuple[float, list[str], subprocess.Popen[str]]](), num_processors()
    while left or running:
        while left and len(running) < room:
            command = left.popleft()
            running.append((time.monotonic() + _TIMEOUT_S, command, guard.start(command)))
        deadline, command, process = running.popleft()
        try:
            text, _ = process.communicate(timeout=_LISTEN_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(command, _TIMEOUT_S) from None
            running.append((deadline, command, process))
            continue
        if process.returncode:
            raise BuildError(_failure(command, text))


def num_processors() -> int:
    """Compilers that run at once: more would take no less time, and memory that a small container does not have."""
    quota = cpu_quota()
    return max(1, len(allowed_cpus()) if quota is None else min(len(allowed_cpus()), math.ceil(quota)))


def _remove_stale(folder: Path) -> None:
    for left in folder.glob("build-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _failure(command: list[str], text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no message"]
    return f"{lines[0]} (from {shlex.join(command)})"

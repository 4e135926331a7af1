"""Compile the C kernels for exactly this processor, once, and keep the result in the cache folder.

The key covers the sources, the flags, the compiler and the processor, so a changed machine or version compiles anew.
One process compiles and the others wait for it, as far as the file system has locks; each works in its own temporary
folder and renames the finished library into place.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ... import env, storage
from ...errors import ConfigError, TwofoldError
from ...log import get_logger
from ...platforms.cpu_info import cpu_info
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
_TIMEOUT_S = 300
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
    if not os.path.exists(target):
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
    digest = hashlib.sha256()
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    for part in (shlex.join(compiler).encode(), version, shlex.join(flags).encode(), cpu_info().fingerprint().encode()):
        digest.update(part + b"\0")
    for path in (*sources(), *sorted(_SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(tape_calls_source().encode())
    return digest.hexdigest()[:24]


def _compile(compiler: list[str], flags: tuple[str, ...], target: Path) -> None:
    try:
        with storage.writing(target.parent), storage.turn(target.with_suffix(".lock"), target, _TIMEOUT_S):
            if not os.path.exists(target):
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
            os.replace(library, target)
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - start)


def _compile_objects(guard: CompilerGuard, compiler: list[str], flags: tuple[str, ...], folder: Path) -> list[Path]:
    generated = folder / "tape_calls.c"
    generated.write_text(tape_calls_source())
    files = (*sources(), generated)
    objects = [folder / f"{source.stem}.o" for source in files]
    prefix = [*compiler, *flags, "-I", str(_SOURCES), "-c"]
    pairs = zip(files, objects, strict=True)
    _finish(guard, [[*prefix, str(source), "-o", str(output)] for source, output in pairs])
    return objects


def _finish(guard: CompilerGuard, commands: list[list[str]]) -> None:
    """All ``commands`` at once, one process each; BuildError where one fails."""
    failures = []
    for command, process in [(command, guard.start(command)) for command in commands]:
        text, _ = process.communicate(timeout=_TIMEOUT_S)
        if process.returncode:
            failures.append(_failure(command, text))
    if failures:
        raise BuildError(failures[0])


def _remove_stale(folder: Path) -> None:
    for left in folder.glob("build-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _failure(command: list[str], text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no message"]
    return f"{shlex.join(command)} failed: {lines[0]}"

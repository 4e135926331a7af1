"""Compile the C kernels for exactly this processor, once, and keep the result in the cache folder.

The key covers the sources, the flags, the compiler and the processor, so a changed machine or version compiles anew.
Two processes may compile at the same time: each works in its own temporary folder and renames the finished library into
place.
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
from pathlib import Path

from ... import env, storage
from ...errors import ConfigError, TwofoldError
from ...log import get_logger
from ...platforms.cpu_info import cpu_info
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
    start = time.monotonic()
    logger.info("compiling the CPU kernels for %s, once for this processor", cpu_info().arch)
    try:
        with storage.writing(target.parent), tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            objects = _compile_objects(compiler, flags, Path(folder))
            library = Path(folder) / "library.so"
            _check([*compiler, *flags, "-shared", *map(str, objects), "-o", str(library), "-lm"])
            os.replace(library, target)
    except storage.StorageError as error:
        raise BuildError(str(error)) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the CPU kernels could not be compiled into {target.parent}: {error}") from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - start)


def _compile_objects(compiler: list[str], flags: tuple[str, ...], folder: Path) -> list[Path]:
    """All sources at once, one compiler process each."""
    jobs: list[tuple[Path, list[str], subprocess.Popen[str]]] = []
    generated = folder / "tape_calls.c"
    generated.write_text(tape_calls_source())
    for source in (*sources(), generated):
        output = folder / f"{source.stem}.o"
        command = [*compiler, *flags, "-I", str(_SOURCES), "-c", str(source), "-o", str(output)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        jobs.append((output, command, process))
    failures = []
    for _, command, process in jobs:
        text, _ = process.communicate(timeout=_TIMEOUT_S)
        if process.returncode:
            failures.append(_failure(command, text))
    if failures:
        raise BuildError(failures[0])
    return [output for output, _, _ in jobs]


def _check(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise BuildError(_failure(command, result.stderr))


def _failure(command: list[str], text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no message"]
    return f"{shlex.join(command)} failed: {lines[0]}"

"""The compiled kernels as a loaded library with typed functions, working with the platform's number of threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...log import get_logger
from ...platforms import cpu_threads
from ..problems import dtype_name
from .build import BuildError, library_path
from .signatures import RECORDED, RETURNING, SIGNATURES

logger = get_logger(__name__)

# Characters of a reason that is given wherever a kernel is refused; a compiler's message can be much longer.
_BRIEF = 120


@functools.cache
def load() -> ctypes.CDLL | str:
    """The library, or why there is none, in words; compiled, loaded and logged about once per process."""
    try:
        return open_library(library_path())
    except (BuildError, OSError) as error:
        logger.warning("no compiled CPU kernels, using torch's slower operations: %s", error)
        return str(error)


def library() -> ctypes.CDLL:
    """The library, where ``unavailable()`` is None."""
    loaded = load()
    assert isinstance(loaded, ctypes.CDLL), loaded
    return loaded


class Functions:
    """The library's functions as attributes, loaded on first use; a plain attribute from then on."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(library(), name)
        setattr(self, name, function)
        return function

    @contextlib.contextmanager
    def diverted(self, divert: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """For a time ``divert(name, function)`` stands for each function that a recorded step may call."""
        try:
            for name in RECORDED:
                setattr(self, name, divert(name, getattr(library(), name)))
            yield
        finally:
            vars(self).clear()


functions = Functions()


def unavailable() -> str | None:
    """None when the compiled kernels can be used, else the reason, or where to find it if it is long."""
    reason = why_unavailable()
    if reason is None or len(reason) <= _BRIEF:
        return reason
    return "there are no compiled CPU kernels (twofold doctor says why, under compiler)"


def why_unavailable() -> str | None:
    """The same, the whole reason: a compiler's message with its command, say."""
    loaded = load()
    return loaded if isinstance(loaded, str) else None


def unavailable_for(dtype: torch.dtype) -> str | None:
    """The same for kernels that compute in float32 alone, asked for ``dtype``."""
    if dtype is not torch.float32:
        return f"it computes in float32, not {dtype_name(dtype)}"
    return unavailable()


def open_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library and tell it how many threads to use, and on which CPUs."""
    opened = ctypes.CDLL(str(path))
    describe(opened)
    return opened


def describe(opened: ctypes.CDLL) -> None:
    """Give a library's functions their types, and the library the platform's threads."""
    for name, arguments in SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int if name in RETURNING else None
    opened.twofold_set_threads_cell(cpu_threads.cell_address())
    opened.twofold_set_team_cpus(cpu_threads.team_address())

"""The compiled kernels as a loaded library with typed functions, on torch's own OpenMP thread team."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from ...log import get_logger
from .build import BuildError, library_path

logger = get_logger(__name__)

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_float

_SIGNATURES: dict[str, list[type]] = {
    "twofold_set_team": [_P, _P, _P],
    "twofold_panel_width": [],
    "twofold_pack_panels": [_P, _N, _N, _N, _P, _I],
    "twofold_linear_dense": [_P, _N, _N, _N, _N, _P, _P, _P, _N, _I],
    "twofold_linear_low_bit": [_P, _N, _N, _N, _N, _P, _P, _P, _N, _N, _N, _I, _P, _P, _N, _I],
    "twofold_paged_attention": [_P, _P, _P, _P, _P, _P, _P, _P, _F, _F, _I],
    "twofold_rms_norm": [_P, _N, _N, _N, _N, _N, _P, _P, _F, _F, _P, _P, _I],
    "twofold_rope": [_P, _P, _N, _N, _N, _N, _N, _N, _N, _P, _N, _P, _I, _I],
    "twofold_silu_and_mul": [_P, _N, _N, _N, _P, _I],
    "twofold_write_kv": [_P, _P, _P, _P, _P, _P, _I],
}


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


def unavailable() -> str | None:
    """None when the compiled kernels can be used, else the reason."""
    loaded = load()
    return loaded if isinstance(loaded, str) else None


def open_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library and hand it the thread team."""
    opened = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes = arguments
        function.restype = _I if name == "twofold_panel_width" else None
    team = _thread_team()
    if team is not None:
        opened.twofold_set_team(*team)
    return opened


def _thread_team() -> tuple[int, int, int] | None:
    """Addresses of the OpenMP entry points that torch uses; None (one thread) when torch has no OpenMP that we know.

    A second runtime would keep a second set of spinning threads, so the one already loaded is taken: by its file name
    where torch brings its own, else from the process's global symbols.
    """
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))
    bundled += sorted((Path(torch.__file__).parent.parent / "torch.libs").glob("lib*omp*.so*"))
    for name in (*map(str, bundled), None):
        try:
            runtime = ctypes.CDLL(name)
            functions = (runtime.GOMP_parallel, runtime.omp_get_thread_num, runtime.omp_get_num_threads)
        except (OSError, AttributeError):
            continue
        first, second, third = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        return first, second, third
    logger.warning("torch's OpenMP runtime was not found: the compiled CPU kernels use one thread")
    return None

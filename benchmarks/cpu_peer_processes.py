"""Starts and stops what cpu_peers.py compares; every peer answers ``run(workload) -> [Trace]``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engines import Trace
from workloads import Workload

_HERE = Path(__file__).parent
_START_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How to start one row of the table. ``port`` stands for the port in ``command``; ``http`` False: in_process.py."""

    name: str
    command: list[str]
    version: str
    http: bool = True
    extra: dict[str, object] = field(default_factory=dict)


def find_peers(model: str, gguf: Sequence[str], threads: int) -> list[Peer]:
    """All peers that are installed, Twofold's rows first."""
    return [
        *_twofold(model, gguf, threads),
        *_llama_cpp(gguf, threads),
        *_openvino(threads),
        *_transformers(model, threads),
    ]


def _twofold(model: str, gguf: Sequence[str], threads: int) -> list[Peer]:
    from twofold.version import __version__

    rows = {f"twofold:{Path(path).stem}": [path] for path in gguf}
    rows |= {f"{name}+int8": [*words, "--cpu-activations", "int8"] for name, words in list(rows.items())}
    rows["twofold:int8"] = [model, "--quantization", "int8"]
    rows["twofold:int8+int8"] = [model, "--quantization", "int8", "--cpu-activations", "int8"]
    rows["twofold:float32"] = [model, "--dtype", "float32"]
    fixed = ["--device", "cpu", "--num-threads", str(threads), "--port", "{port}", "--max-model-len", "2048"]
    serve = [sys.executable, "-m", "twofold", "serve"]
    return [
        Peer(name=name, command=[*serve, *words, *fixed], version=__version__, extra={"ignore_eos": True})
        for name, words in rows.items()
    ]


def _llama_cpp(gguf: Sequence[str], threads: int) -> list[Peer]:
    binary = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if not binary:
        return []
    told = subprocess.run([binary, "--version"], capture_output=True, text=True)
    version = os.environ.get("LLAMA_VERSION") or (told.stderr + told.stdout).strip().splitlines()[0]
    words = ["-t", str(threads), "-tb", str(threads), "-np", "32", "-c", "36864", "--no-kv-unified", "-b", "2048"]
    words += ["-ub", "512", "--fit", "off", "--host", "127.0.0.1", "--port", "{port}"]
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
    python, models = os.environ.get("OPENVINO_PYTHON"), os.environ.get("OPENVINO_MODELS")
    if not python or not models:
        return []
    folders = sorted(path.parent for path in Path(models).glob("*/openvino_model.xml"))
    return [
        _child(f"openvino:{path.name}", python, "openvino", str(path), threads, "openvino-genai") for path in folders
    ]


def _transformers(model: str, threads: int) -> list[Peer]:
    python = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import transformers"], capture_output=True).returncode:
        return []
    kinds = ("transformers", "transformers-cb")
    return [_child(kind, python, kind, model, threads, "transformers") for kind in kinds]


def _child(name: str, python: str, kind: str, model: str, threads: int, module: str) -> Peer:
    ask = f"import importlib.metadata as m; print(m.version({module!r}))"
    version = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()
    return Peer(
        name=name,
        command=[python, str(_HERE / "in_process.py"), kind, model, str(threads)],
        version=version,
        http=False,
    )


class Running:
    """A started peer. ``start_s`` is the time from the command to the end of its first request."""

    def __init__(self, peer: Peer, cores: set[int], first: Workload, log: str = os.devnull) -> None:
        self._peer = peer
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "TOKENIZERS_PARALLELISM": "false"}
        pipe = None if peer.http else subprocess.PIPE
        os.sched_setaffinity(0, cores)  # inherited
        start = time.perf_counter()
        with open(log, "a") as errors:
            self._process = subprocess.Popen(
                [word.replace("{port}", str(port)) for word in peer.command],
                stdin=pipe,
                stdout=pipe or errors,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        try:
            self._model = self._wait() if peer.http else ""
            self.run(first)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - start

    def _wait(self) -> str:
        from twofold.cli.openai_client import OpenAIClient
        from twofold.errors import TwofoldError

        client, limit = OpenAIClient(self._url), time.monotonic() + _START_SECONDS
        while time.monotonic() < limit and self._process.poll() is None:
            try:
                return client.model_names()[0]
            except (TwofoldError, IndexError):
                time.sleep(0.1)
        raise SystemExit(f"{self._peer.name} did not get ready; look at its log with --log FILE")

    def run(self, workload: Workload) -> list[Trace]:
        """Complete all requests of a workload; traces in no particular order."""
        if self._peer.http:
            return self._over_http(workload)
        assert self._process.stdin and self._process.stdout
        answer = ""
        with suppress(BrokenPipeError):
            print(json.dumps(asdict(workload)), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._peer.name} ended; look at its log with --log FILE")
        return [Trace(**trace) for trace in json.loads(answer)]

    def _over_http(self, workload: Workload) -> list[Trace]:
        from twofold.cli.load_generator import Job, run_load
        from twofold.cli.openai_client import OpenAIClient

        jobs = [Job(prompt=request.prompt, output_len=request.num_output) for request in workload.requests]
        report = run_load(OpenAIClient(self._url), self._model, jobs, workload.concurrency, self._peer.extra)
        for outcome in report.outcomes:
            if outcome.error:
                raise SystemExit(f"{self._peer.name}: {outcome.error}")
        asked = sum(request.num_output for request in workload.requests)
        if (told := sum(outcome.num_output_tokens for outcome in report.outcomes)) != asked:
            raise SystemExit(f"{self._peer.name} made {told} tokens of the {asked} that {workload.name} asks for")
        return [Trace(outcome.started, outcome.arrivals) for outcome in report.outcomes]

    def peak_bytes(self) -> int:
        """Sum of the processes' highest resident memory so far."""
        return sum(_high_water(pid) for pid in _tree(self._process.pid))

    def stop(self) -> None:
        """End it and all that it started."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, sent)
                try:
                    self._process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    continue


def _tree(root: int) -> list[int]:
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        except OSError:
            continue
    return found


def _high_water(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

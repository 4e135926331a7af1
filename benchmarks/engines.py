"""The engines that peers.py compares, behind one call: ``run(workload) -> [Trace]``, greedy, end of text ignored."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from workloads import Request, Workload


@dataclass
class Trace:
    """One request: when it was sent, when each token or piece of text came, and the tokens where they are told."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Engine(Protocol):
    """Something that completes requests."""

    def run(self, workload: Workload) -> list[Trace]:
        """Complete all requests, at most ``workload.concurrency`` at once; traces in the order of the requests."""

    def close(self) -> None:
        """Free it."""


class TransformersStatic:
    """transformers' generate: left-padded batches of ``concurrency`` requests, each as long as its longest output."""

    def __init__(self, model: str, threads: int, dtype: str = "float32") -> None:
        self.model = _load_transformers(model, threads, dtype)

    def run(self, workload: Workload) -> list[Trace]:
        size = workload.concurrency
        start = time.perf_counter()
        traces = [Trace(start) for _ in workload.requests]
        for first in range(0, len(traces), size):
            batch = slice(first, first + size)
            self._batch(workload.requests[batch], traces[batch])
        return traces

    def _batch(self, requests: list[Request], traces: list[Trace]) -> None:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        width = max(len(request.prompt) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        lengths = torch.tensor([request.num_output for request in requests])

        class Log(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                num_new = input_ids.shape[1] - width
                now = time.perf_counter()
                for trace, request, token in zip(traces, requests, input_ids[:, -1].tolist(), strict=True):
                    if num_new <= request.num_output:
                        trace.arrivals.append(now)
                        trace.tokens.append(token)
                return lengths <= num_new

        with torch.inference_mode():
            self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=-1,
                max_new_tokens=int(lengths.max()),
                stopping_criteria=StoppingCriteriaList([Log()]),
            )

    def close(self) -> None:
        del self.model


class TransformersContinuous:
    """transformers' continuous batching, with its paged cache and block sharing, in a closed loop."""

    def __init__(self, model: str, threads: int, dtype: str = "float32") -> None:
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        self.model = _load_transformers(model, threads, dtype)
        self._manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128),
            # As many tokens of cache as 32 requests of W3 need, and Twofold's own step size.
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=1024),
        )
        self._manager.start()

    def run(self, workload: Workload) -> list[Trace]:
        traces: dict[str, Trace] = {}
        order: list[str] = []
        waiting = list(reversed(workload.requests))

        def send() -> None:
            request = waiting.pop()
            started = time.perf_counter()
            name = self._manager.add_request(
                request.prompt, max_new_tokens=request.num_output, record_timestamps=True, eos_token_id=-1
            )
            assert name is not None, "transformers refused a request"
            traces[name] = Trace(started)
            order.append(name)

        for _ in range(min(workload.concurrency, len(waiting))):
            send()
        num_done = 0
        while num_done < len(workload.requests):
            result = self._manager.get_result(timeout=1)
            if result is None:
                assert self._manager.is_running(), "transformers' continuous batching stopped"
                continue
            if result.is_finished():
                assert result.error is None, result.error
                num_done += 1
                traces[result.request_id].arrivals = list(result.timestamps)
                traces[result.request_id].tokens = list(result.generated_tokens)
                if waiting:
                    send()
        return [traces[name] for name in order]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)


class TwofoldOffline:
    """Twofold's engine in this process, stepped in a closed loop."""

    def __init__(self, model: str, threads: int, quantize: str | None = None) -> None:
        from twofold.engine.config import EngineConfig
        from twofold.engine.core.engine_core import EngineCore

        config = EngineConfig(model=model, dtype="float32", device="cpu", num_threads=threads, quantize=quantize)
        self._core = EngineCore(config)
        self._num_sent = 0

    def run(self, workload: Workload) -> list[Trace]:
        traces: dict[str, Trace] = {}
        waiting = list(reversed(workload.requests))
        for _ in range(min(workload.concurrency, len(waiting))):
            self._send(waiting.pop(), traces)
        while self._core.has_work():
            outputs = self._core.step()
            now = time.perf_counter()
            for output in outputs:
                trace = traces[output.request_id]
                trace.arrivals += [now] * len(output.token_ids)
                trace.tokens += output.token_ids
                if output.finish_reason and waiting:
                    self._send(waiting.pop(), traces)
        return list(traces.values())

    def _send(self, request: Request, traces: dict[str, Trace]) -> None:
        from twofold.engine.messages import EngineRequest
        from twofold.engine.sampling_params import SamplingParams

        self._num_sent += 1
        name = str(self._num_sent)
        params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True, seed=0)
        traces[name] = Trace(time.perf_counter())
        self._core.add_request(EngineRequest(request_id=name, prompt_token_ids=request.prompt, params=params))

    def close(self) -> None:
        self._core.shutdown()


class TwofoldServer:
    """`twofold serve` in a process of its own, over HTTP with one connection per request."""

    def __init__(self, model: str, threads: int, quantize: str | None = None) -> None:
        from twofold.cli.openai_client import OpenAIClient

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "twofold", "serve", model, "--port", str(port), "--dtype", "float32"]
        command += ["--device", "cpu", "--num-threads", str(threads)] + (["--quantize", quantize] if quantize else [])
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._client = OpenAIClient(f"http://127.0.0.1:{port}")
        self._name = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        from twofold.errors import TwofoldError

        limit = time.monotonic() + 300
        while time.monotonic() < limit and self._process.poll() is None:
            try:
                return self._client.model_names()[0]
            except TwofoldError:
                time.sleep(0.2)
        self.close()
        raise SystemExit("twofold serve did not get ready")

    def run(self, workload: Workload) -> list[Trace]:
        with ThreadPoolExecutor(workload.concurrency) as pool:
            return list(pool.map(self._complete, workload.requests))

    def _complete(self, request: Request) -> Trace:
        body = {
            "model": self._name,
            "prompt": request.prompt,
            "max_tokens": request.num_output,
            "temperature": 0,
            "ignore_eos": True,
        }
        trace = Trace(time.perf_counter())
        for arrived, event in self._client.stream("/v1/completions", body):
            if any(choice.get("text") for choice in event.get("choices") or []):
                trace.arrivals.append(arrived)
        return trace

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "transformers": TransformersStatic,
    "transformers-cb": TransformersContinuous,
    "twofold": TwofoldOffline,
    "twofold-server": TwofoldServer,
    "twofold-w4": lambda model, threads: TwofoldOffline(model, threads, "rtn:4:32"),
    "twofold-w4-server": lambda model, threads: TwofoldServer(model, threads, "rtn:4:32"),
}


def _load_transformers(model: str, threads: int, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    wide = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(model, dtype=wide, attn_implementation="sdpa").eval()


class PeakMemory:
    """Highest resident memory of this process and its children, sampled five times a second."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self.bytes = max(self.bytes, _resident_bytes())

    def stop(self) -> int:
        """The peak in bytes."""
        self._stop.set()
        self._thread.join()
        return self.bytes


def _resident_bytes() -> int:
    """Proportional set size of the process tree: pages that several processes share count once."""
    pids, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        pids.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    todo += [int(child) for child in children.read().split()]
        except OSError:
            continue
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as rollup:
                total += sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
        except OSError:
            continue
    return total

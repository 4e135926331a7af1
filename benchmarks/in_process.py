"""A library without an HTTP server, driven by cpu_peers.py: ``in_process.py KIND MODEL THREADS DTYPE``, by its Python.

Reads a workload as one JSON line from standard input and answers with one line of traces, until the input ends. Needs
the standard library and the peer alone. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engines import Engine, Trace, TransformersContinuous, TransformersStatic
from workloads import Request, Workload


class OpenVINO:
    """openvino-genai's continuous batching with its paged cache and prefix cache, in a closed loop."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        import openvino_genai

        self._library = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1  # GiB; W3 needs 0.6 of float32
        scheduler.max_num_batched_tokens = 1024
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": dtype,
            "KV_CACHE_PRECISION": dtype,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._num_sent = 0

    def run(self, workload: Workload) -> list[Trace]:
        traces = [Trace(0.0) for _ in workload.requests]
        waiting = list(reversed(range(len(traces))))
        live: dict[int, Any] = {}
        while waiting or live:
            while waiting and len(live) < workload.concurrency:
                index = waiting.pop()
                traces[index].started = time.perf_counter()
                live[index] = self._send(workload.requests[index])
            self._pipeline.step()
            now = time.perf_counter()
            for index, handle in list(live.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        traces[index].arrivals += [now] * len(output.generated_ids)
                        traces[index].tokens += output.generated_ids
                if len(traces[index].tokens) >= workload.requests[index].num_output:
                    del live[index]
        return traces

    def _send(self, request: Request) -> Any:
        import numpy as np
        import openvino

        config = self._library.GenerationConfig()
        config.max_new_tokens = request.num_output
        config.ignore_eos = True
        config.do_sample = False
        self._num_sent += 1
        ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        return self._pipeline.add_request(self._num_sent, ids, config)

    def close(self) -> None:
        del self._pipeline


KINDS: dict[str, Callable[[str, int, str], Engine]] = {
    "openvino": OpenVINO,
    "transformers": TransformersStatic,
    "transformers-cb": TransformersContinuous,
}


def main() -> None:
    """Answer workloads until the input ends."""
    kind, model, threads, dtype = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print what they like
    engine = KINDS[kind](model, int(threads), dtype)
    for line in sys.stdin:
        row = json.loads(line)
        workload = Workload(row["name"], [Request(**request) for request in row["requests"]], row["concurrency"])
        traces = engine.run(workload)
        print(json.dumps([asdict(trace) for trace in traces]), file=answers, flush=True)
    engine.close()


if __name__ == "__main__":
    main()

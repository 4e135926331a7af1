"""Graphs on GPUs of both vendors, captured and replayed by torch (``torch.cuda.CUDAGraph``, hipGraph on ROCm)."""

from __future__ import annotations

from typing import Any

import torch

from .graphs import Graph, GraphRecorder, Step, UnrecordableError

# Batches are padded to a power of two below this number of rows, and to a multiple of it above.
_ROWS = 8


class TorchGpuGraph(Graph):
    """One captured step."""

    def __init__(self, graph: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()


class TorchGpuRecorder(GraphRecorder):
    """Captures steps into one memory pool; ``cuda`` is ``torch.cuda``."""

    name = "captured by torch"

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._pool: Any = None
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def rows_for(self, num_rows: int) -> int:
        if num_rows < _ROWS:
            return 1 << (num_rows - 1).bit_length()
        return -(-num_rows // _ROWS) * _ROWS

    def record(self, step: Step) -> TorchGpuGraph:
        cuda, before = self._cuda, self._cuda.memory_reserved(self._device)
        # Kernels are compiled and libraries make their workspaces in a run before: neither may happen in a capture.
        aside = cuda.Stream(self._device)
        aside.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(aside):
            step()
        cuda.current_stream(self._device).wait_stream(aside)
        graph = cuda.CUDAGraph()
        try:
            with cuda.graph(graph, pool=self._pool):
                outputs = step()
        except RuntimeError as error:
            raise UnrecordableError(str(error).strip().splitlines()[0]) from error
        if self._pool is None:
            self._pool = graph.pool()
        self._num_bytes += max(0, cuda.memory_reserved(self._device) - before)
        return TorchGpuGraph(graph, outputs)

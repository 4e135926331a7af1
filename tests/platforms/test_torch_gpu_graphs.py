"""The bookkeeping of graphs on GPUs, with a stand-in for ``torch.cuda``: no device is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from twofold.kernels.attention_batch import RecordedBatch
from twofold.platforms.graphs import UnrecordableError
from twofold.platforms.torch_gpu_graphs import TorchGpuRecorder


class FakeCuda:
    """Notes what is done in which order; ``memory_reserved`` grows by 100 with each capture."""

    def __init__(self, failure: str = "") -> None:
        self.log: list[str] = []
        self.pools: list[Any] = []
        self.reserved = 1000
        self._failure = failure

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.log, "aside")

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.log, "current")

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append("enter aside")
        yield

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self.log)

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, pool: Any) -> Iterator[None]:
        self.log.append("capture")
        self.pools.append(pool)
        self.reserved += 100
        yield
        if self._failure:
            raise RuntimeError(self._failure)

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self._name} waits")


class FakeGraph:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self._log.append("replay")


def test_a_step_runs_once_before_it_is_captured_and_pools_are_shared() -> None:
    cuda = FakeCuda()
    recorder = TorchGpuRecorder(torch.device("cpu"), cuda)
    out = torch.zeros(1)

    def step() -> tuple[torch.Tensor]:
        cuda.log.append("step")
        return (out,)

    first = recorder.record(step)
    assert cuda.log == ["aside waits", "enter aside", "step", "current waits", "capture", "step"]
    recorder.record(step)
    assert cuda.pools == [None, "pool"] and recorder.num_bytes == 200
    first.replay()
    assert cuda.log[-1] == "replay" and first.outputs == (out,)


def test_a_capture_that_fails_says_why() -> None:
    recorder = TorchGpuRecorder(torch.device("cpu"), FakeCuda("operation not permitted when stream is capturing\nmore"))
    with pytest.raises(UnrecordableError, match=r"^operation not permitted when stream is capturing$"):
        recorder.record(lambda: ())


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (64, 64), (65, 72)])
def test_padding(rows: int, padded: int) -> None:
    assert TorchGpuRecorder(torch.device("cpu"), FakeCuda()).rows_for(rows) == padded


def test_lengths_on_the_host_are_not_told_while_a_step_is_recorded() -> None:
    part = torch.zeros(2)
    batch = RecordedBatch(
        query_start_loc=part, seq_lens=part, block_table=part, slot_mapping=part, query_lens_host=(1, 1), longest=77
    )
    assert batch.max_seq_len == 77 and batch.num_requests == 2 and batch.max_query_len == 1
    for look in (list, max, len, lambda lengths: lengths[0], lambda lengths: zip(lengths, (1,), strict=False)):
        with pytest.raises(UnrecordableError, match="lengths of the requests on the host"):
            look(batch.seq_lens_host)

"""Weights carved out of large chunks: aligned, apart from each other, alive as long as needed."""

from __future__ import annotations

import gc

import pytest
import torch
from twofold.kernels.cpu import weight_memory
from twofold.kernels.cpu.library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")


def test_tensors_are_aligned_and_do_not_overlap():
    shapes = [((3, 5), torch.float32), ((7,), torch.uint8), ((0, 4), torch.int32), ((1000, 33), torch.int32)] * 20
    tensors = [weight_memory.empty(shape, dtype) for shape, dtype in shapes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous() and tensor.data_ptr() % 256 == 0
        assert (tensor == value).all()


def test_many_chunks_and_a_tensor_larger_than_one(monkeypatch):
    monkeypatch.setattr(weight_memory, "_CHUNK", 4 << 20)
    tensors = [weight_memory.empty((1 << 19,), torch.float32) for _ in range(5)]
    tensors.append(weight_memory.empty((3 << 20,), torch.float32))
    assert tensors[-1].data_ptr() % (2 << 20) == 0
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    kept = tensors.pop(1)
    del tensors, tensor
    gc.collect()
    assert (kept == 1).all()

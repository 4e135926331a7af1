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


def test_a_reservation_serves_what_fits_and_leaves_the_rest_alone(monkeypatch):
    page = 2 << 20
    monkeypatch.setattr(weight_memory, "_CHUNK", 4 * page)
    with weight_memory.reserve(16 * page):
        tensors = [weight_memory.empty((3 * page,), torch.uint8) for _ in range(5)]
        with weight_memory.reserve(16 * page):
            beyond = weight_memory.empty((4 * page,), torch.uint8)
        for value, tensor in enumerate([*tensors, beyond]):
            tensor.fill_(value + 1)
    first = tensors[0].data_ptr()
    assert [tensor.data_ptr() - first for tensor in tensors] == [3 * page * index for index in range(5)]
    assert not first <= beyond.data_ptr() < first + 16 * page
    after = weight_memory.empty((page,), torch.uint8).fill_(9)
    assert not first <= after.data_ptr() < first + 16 * page
    for value, tensor in enumerate([*tensors, beyond]):
        assert (tensor == value + 1).all()
    untouched = tensors[0].as_strided((page,), (1,), tensors[0].storage_offset() + 15 * page)
    assert not untouched.any(), "what nobody took was never written to"


def test_a_reservation_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(weight_memory, "_CHUNK", 1 << 20)
    with pytest.raises(KeyError), weight_memory.reserve(8 << 20):
        raise KeyError
    assert weight_memory._reservation is None


def test_scratch_is_taken_again_when_no_tensor_of_it_is_left() -> None:
    with weight_memory.reserve(1 << 27):
        first = weight_memory.scratch(4096).view(torch.int32).view(32, 32)
        first.fill_(7)
        view = first.T
        address = first.data_ptr()
        del first
        other = weight_memory.scratch(4096)
        assert other.data_ptr() != address  # a view is left
        other.fill_(1)
        assert bool((view == 7).all())
        address = other.data_ptr()
        del other
        assert weight_memory.scratch(1024).data_ptr() == address
    assert weight_memory.scratch(16).shape == (16,)

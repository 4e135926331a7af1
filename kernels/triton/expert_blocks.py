"""How the products with experts go through a step: blocks of rows that share an expert.

A choice is one (token, expert) pair, number t * k + j. Its row of the result is ``out[choice]``, its row of the input
``x[choice // choices_per_row]``: the kernels gather and scatter by these numbers, nothing is copied in between.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .moe_align import align, max_blocks

# With so many experts per choice hardly two choices share one, and each choice is a block by itself.
SPARSE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """``order`` and ``table`` as in ``moe_align``; where not ``aligned``, block b is choice b and both are unused."""

    ids: Tensor
    order: Tensor
    table: Tensor
    num_blocks: int
    num_experts: int
    aligned: bool

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """What every kernel takes: ids, order, table, number of blocks and of experts."""
        return self.ids, self.order, self.table, self.num_blocks, self.num_experts


@triton.jit
def load_block(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_blocks: tl.tensor,
    num_experts: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(expert, whether there is one, choices int64 [BLOCK_M], which of them to store) of this program's block."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK_M)
    if ALIGNED:
        expert = tl.load(blocks_ptr + block)
        first = tl.load(blocks_ptr + num_blocks + block)
        count = tl.where(expert >= 0, tl.load(blocks_ptr + 2 * num_blocks + block), 0)
        mask = lane < count
        choices = tl.load(order_ptr + first + lane, mask=mask, other=0)
    else:
        expert = tl.load(ids_ptr + block)
        mask = lane < 1
        choices = block + lane * 0
    has_expert = (expert >= 0) & (expert < num_experts)
    return tl.where(has_expert, expert, 0).to(tl.int64), has_expert, choices.to(tl.int64), mask


@dataclass(slots=True)
class _Last:
    """The blocks of the latest ``expert_ids``: the second product of a layer finds the sorting of the first."""

    ids: weakref.ref[Tensor] | None = None
    key: tuple[Any, ...] = ()
    blocks: Blocks | None = None


_last = _Last()


def blocks_of(expert_ids: Tensor, num_experts: int, block_m: int) -> Blocks:
    """The blocks of ``expert_ids`` int32 [T,k], which the caller must not change in place between two products."""
    flat = expert_ids.reshape(-1)
    choices = flat.numel()
    if expert_ids.shape[0] == 1 or choices * SPARSE <= num_experts:
        return Blocks(flat, flat, flat, choices, num_experts, aligned=False)
    key = (num_experts, block_m, None if expert_ids.is_inference() else expert_ids._version)
    if _last.blocks is None or _last.ids is None or _last.ids() is not expert_ids or _last.key != key:
        aligned = align(expert_ids, num_experts, block_m)
        size = max_blocks(choices, num_experts, block_m)
        blocks = Blocks(flat, aligned.order, aligned.blocks, size, num_experts, aligned=True)
        _last.ids, _last.key, _last.blocks = weakref.ref(expert_ids), key, blocks
    assert _last.blocks is not None
    return _last.blocks


def input_rows(x: Tensor, expert_ids: Tensor) -> tuple[Tensor, int]:
    """(x as contiguous-enough rows, how many choices share one): x [T,K], or [T,k,K] with a row for each choice."""
    choices_per_row = 1 if x.dim() == 3 else expert_ids.shape[1]
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous(), choices_per_row


def expected_rows(expert_ids: Tensor, num_experts: int) -> int:
    """Rows that an expert gets when all get as many: the shape class of a launch."""
    return int(triton.cdiv(expert_ids.numel(), num_experts))


def stack(tensors: list[Tensor]) -> Tensor:
    """[E, ...] of equal tensors; without a copy where they are neighbours in one tensor already."""
    first = tensors[0]
    if first.is_contiguous() and all(_follows(first, tensor, index) for index, tensor in enumerate(tensors)):
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in tensors]).view(
        first.dtype
    )


class StreamedStack:
    """``stack`` of tensors that come one by one: each goes to its place at once, so that one is beside the result."""

    def __init__(self, count: int) -> None:
        self._count, self._num_put = count, 0
        self._neighbours: list[Tensor] = []
        self._whole: Tensor | None = None

    def put(self, tensor: Tensor) -> None:
        """The next expert's."""
        index, kept = self._num_put, self._neighbours
        self._num_put += 1
        if self._whole is None:
            if index == 0 or (kept[0].is_contiguous() and _follows(kept[0], tensor, index)):
                kept.append(tensor)
                return
            self._whole = tensor.new_empty((self._count, *tensor.shape))
            for place, before in enumerate(kept):
                self._whole[place].copy_(before)
            kept.clear()
        self._whole[index].copy_(tensor)

    def finish(self) -> Tensor:
        """[E, ...]."""
        return stack(self._neighbours) if self._whole is None else self._whole


def stack_all(tensors: list[Tensor | None]) -> Tensor | None:
    """``stack`` of what every expert has, or None where none has it."""
    given = [tensor for tensor in tensors if tensor is not None]
    assert len(given) in (0, len(tensors)), "experts of one scheme all have a tensor, or none has"
    return stack(given) if given else None


def _follows(first: Tensor, tensor: Tensor, index: int) -> bool:
    start = first.storage_offset() + index * first.numel()
    same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    like = tensor.shape == first.shape and tensor.stride() == first.stride() and tensor.dtype == first.dtype
    return same and like and tensor.storage_offset() == start

"""Tapes for steps of any size: each size computes what it computes alone, and what does not grow evenly is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twofold.kernels.attention_batch import AttentionBatch
from twofold.kernels.cpu import attention, elementwise, linear
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.cpu.tape import TapeRecorder
from twofold.kernels.kv_layout import allocate_kv_cache
from twofold.platforms.graphs import UnrecordableError
from twofold.quant.canonical import DenseWeight

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

LARGEST = (300, 5)
SIZES = [(70, 1), (71, 5), (299, 4), LARGEST]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_each_size_computes_what_it_does_alone() -> None:
    x, residual, weight = randn(LARGEST[0], 48), randn(LARGEST[0], 48), randn(48)
    panels = linear.prepare_dense(DenseWeight(randn(96, 48)), torch.float32)

    def step(tokens: int, requests: int) -> tuple[Tensor, ...]:
        normed, total = elementwise.add_rms_norm(x[:tokens], residual[:tokens], weight, 1e-5)
        gated = elementwise.silu_and_mul(linear.run(normed, panels))
        return gated, torch.cat([total[:, 8:24], gated], 1) * 0.5, gated[:, 8:]

    tape = TapeRecorder().record_sized(step, (65, 1), LARGEST)
    for sizes in SIZES * 2:
        residual.normal_()
        kept = residual.clone()
        expected = tuple(part.clone() for part in step(*sizes))
        residual.copy_(kept)
        assert all(torch.equal(got, part) for got, part in zip(tape.replay(*sizes), expected, strict=True))
        assert torch.equal(residual[sizes[0] :], kept[sizes[0] :]), "rows beyond the step were written"
    assert len(tape.timed_replay(*LARGEST)) == len(tape.names)


def test_sizes_in_arrays_grow_as_well() -> None:
    cache = allocate_kv_cache(40, 16, 2, 16, torch.float32, "cpu")
    cache.key.normal_(), cache.value.normal_()
    query, table = randn(LARGEST[0], 4, 16), torch.randperm(40, dtype=torch.int32)[None].expand(5, -1).contiguous()
    starts, lens = torch.zeros(6, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    slots = torch.zeros(LARGEST[0], dtype=torch.int64)

    def step(tokens: int, requests: int) -> tuple[Tensor]:
        batch = AttentionBatch(
            query_start_loc=starts[: requests + 1],
            seq_lens=lens[:requests],
            block_table=table[:requests],
            slot_mapping=slots[:tokens],
            query_lens_host=(0,) * requests,
            seq_lens_host=(),
        )
        return (attention.paged_attention(query[:tokens], cache, batch, 0.3),)

    tape = TapeRecorder().record_sized(step, (65, 1), LARGEST)
    for tokens, requests in SIZES:
        ends = torch.linspace(0, tokens, requests + 1).round().int()
        starts[: requests + 1] = ends
        lens[:requests] = ends.diff() + 7
        expected = step(tokens, requests)[0]
        assert torch.equal(tape.replay(tokens, requests)[0], expected)


def test_memory_can_be_given_back() -> None:
    x, recorder = randn(LARGEST[0], 64), TapeRecorder()

    def step(tokens: int, requests: int) -> tuple[Tensor]:
        return (elementwise.silu_and_mul(x[:tokens]),)

    tape = recorder.record_sized(step, (65, 1), LARGEST)
    expected = tape.replay(*LARGEST)[0].clone()
    recorder.give_back_pages()
    assert torch.equal(tape.replay(*LARGEST)[0], expected) and expected.any()


def test_a_small_step_lies_in_a_small_part_of_the_memory() -> None:
    x = randn(LARGEST[0], 64)
    tape = TapeRecorder().record_sized(lambda tokens, _: (x[:tokens] * 0.5, x[:tokens] * 2.0), (65, 1), LARGEST)
    first, second = tape.replay(70, 1)
    assert second.data_ptr() - first.data_ptr() == 70 * 64 * 4
    first, second = tape.replay(*LARGEST)
    assert second.data_ptr() - first.data_ptr() == LARGEST[0] * 64 * 4


def other_calls(x: Tensor, tokens: int) -> Tensor:
    return (elementwise.silu_and_mul if tokens > 100 else elementwise.gelu_and_mul)(x[:tokens])


def more_calls(x: Tensor, tokens: int) -> Tensor:
    out = elementwise.silu_and_mul(x[:tokens])
    return elementwise.silu_and_mul(out) if tokens > 100 else out


def uneven(x: Tensor, tokens: int) -> Tensor:
    elementwise.soft_cap(x.view(-1)[: tokens * tokens], 3.0)
    return elementwise.silu_and_mul(x[:tokens])


def outgrowing(x: Tensor, tokens: int) -> Tensor:
    return elementwise.silu_and_mul(x[: 3 * tokens - 130])[:tokens]


def other_rows(x: Tensor, tokens: int) -> Tensor:
    return elementwise.silu_and_mul(x[: tokens // 3])


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (other_calls, "makes other calls"),
        (more_calls, "tensors take does not grow"),
        (uneven, "kernels are told does not grow"),
        (outgrowing, "tensors take does not grow"),
        (other_rows, "not a row per token"),
    ],
)
def test_steps_that_do_not_grow_evenly_are_refused(step, reason: str) -> None:  # type: ignore[no-untyped-def]
    x = randn(2000, 64)
    with pytest.raises(UnrecordableError, match=reason):
        TapeRecorder().record_sized(lambda tokens, requests: (step(x, tokens),), (65, 1), LARGEST)

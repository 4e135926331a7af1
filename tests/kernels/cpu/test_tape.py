"""The tape: what is recorded and refused, what a replay reads; its arena; kernels that stand for torch's operations."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from twofold.kernels.cpu import elementwise, experts, linear
from twofold.kernels.cpu.arena import Arena
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.cpu.signatures import RECORDED, tape_calls_source
from twofold.kernels.cpu.tape import TapeRecorder
from twofold.platforms.graphs import UnrecordableError
from twofold.quant.canonical import DenseWeight

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_recording_computes_nothing_and_replays_read_their_inputs_anew() -> None:
    x, residual, weight = randn(3, 40), randn(3, 40), randn(40)
    panels = linear.prepare_dense(DenseWeight(randn(40, 40)), torch.float32)
    before = residual.clone()

    def step() -> tuple[Tensor, Tensor]:
        normed, total = elementwise.add_rms_norm(x, residual, weight, 1e-5, 1.0)
        return linear.run(normed, panels), total

    tape = TapeRecorder().record(step)
    assert torch.equal(residual, before), "a kernel ran while the step was recorded"
    assert tape.names == ["twofold_rms_norm", "twofold_linear_dense"]
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_(), residual.normal_()
        kept = residual.clone()
        expected = tuple(part.clone() for part in step())
        residual.copy_(kept)
        tape.replay()
        assert all(torch.equal(got, wanted) for got, wanted in zip(tape.outputs, expected, strict=True))
    assert len(tape.timed_replay()) == 2


def test_recording_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
from twofold.kernels.cpu import elementwise, tape
x = torch.ones(2, 8)
print(tape.TapeRecorder().record(lambda: (elementwise.silu_and_mul(x.view(2, 8).reshape(2, 8)),)).names)
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "twofold_silu_and_mul" in done.stdout, done.stderr


def test_every_function_that_may_be_recorded_has_a_call() -> None:
    source = tape_calls_source()
    assert all(f"static int call_{name}(" in source for name in RECORDED)
    assert "twofold_tape_run(" not in source and "twofold_panel_width(" not in source


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (lambda x: (x.exp(),), "aten.exp.default of torch.float32 [4, 6]"),
        (lambda x: (x[x[:, 0] > 0],), "aten.gt.Scalar"),
        (lambda x: (torch.softmax(x, -1),), "aten._softmax.default"),
        (lambda x: (x * float(x.sum()),), "aten.sum.default"),
        (lambda x: (x.to(torch.float16),), "aten._to_copy.default"),
        (lambda x: (x.t().contiguous(),), "a copy of torch.float32"),
        (lambda x: (x * x,), "mul of other than"),
        (lambda x: (x.add_(1.0),), "add of other than"),
        (lambda x: (x.double().clone(),), "aten._to_copy.default"),
        (lambda x: (x.index_select(0, torch.zeros(1, dtype=torch.int64)),), "aten.zeros.default"),
    ],
)
def test_other_operations_are_refused_by_name(step, named) -> None:
    x, recorder = randn(4, 6), TapeRecorder()
    with pytest.raises(UnrecordableError, match=re.escape(named)):
        recorder.record(lambda: step(x))
    assert recorder.record(lambda: (elementwise.silu_and_mul(x),)).names == ["twofold_silu_and_mul"]
    assert torch.equal(x, randn(4, 6))


def test_torch_operations_that_have_a_kernel() -> None:
    """Copies, gathers, a factor and a sum: the same bits as torch's."""
    x, table = randn(5, 12), randn(30, 12)
    ids, columns = torch.tensor([7, 0, 29, 7, 3]), torch.randperm(12)

    def step() -> tuple[Tensor, ...]:
        heads = x.view(5, 3, 4)
        embedded = torch.nn.functional.embedding(ids, table)
        return (
            embedded,
            embedded * 11.3,
            x.index_select(1, columns),
            torch.cat([x, embedded[:, :5], heads[:, 1]], dim=-1),
            heads[:, :2].reshape(-1, 4),
            torch.cat([heads, heads[:, 1:]], dim=1),
            x.clone().add_(embedded),
        )

    tape = TapeRecorder().record(step)
    expected = step()
    tape.replay()
    for got, wanted in zip(tape.outputs, expected, strict=True):
        assert got.shape == wanted.shape and torch.equal(got, wanted)


def test_views_keep_their_memory_and_freed_memory_is_used_again() -> None:
    x = randn(2, 64)

    def chain(count: int) -> tuple[Tensor, ...]:
        first = elementwise.silu_and_mul(x)
        view, rest = first[:1], first
        del first
        for _ in range(count):
            rest = elementwise.rms_norm(rest, torch_ones, 1e-6)
        return view, rest

    torch_ones = torch.ones(32)
    recorder = TapeRecorder()
    tape = recorder.record(lambda: chain(50))
    expected = chain(50)
    tape.replay()
    assert all(torch.equal(got, wanted) for got, wanted in zip(tape.outputs, expected, strict=True))
    assert len({part.data_ptr() // 256 for part in tape.outputs}) == 2
    grown = recorder.num_bytes
    recorder.record(lambda: chain(50))
    assert recorder.num_bytes - grown == tape.num_bytes, "graphs of one recorder share the arena"


def test_calls_of_other_threads_go_through_while_a_step_is_recorded() -> None:
    x, results = randn(2, 8), []

    def step() -> tuple[Tensor]:
        other = threading.Thread(target=lambda: results.append(elementwise.silu_and_mul(x)))
        other.start(), other.join()
        return (elementwise.silu_and_mul(x),)

    tape = TapeRecorder().record(step)
    assert len(tape.names) == 1 and torch.equal(results[0], elementwise.silu_and_mul(x))


def test_a_kernel_that_fails_is_named() -> None:
    panels = experts.prepare(linear.prepare_dense, [DenseWeight(randn(8, 8))], torch.float32)
    x, ids = randn(1, 8), torch.zeros((1, 1), dtype=torch.int32)
    tape = TapeRecorder().record(lambda: (experts.expert_linear(x, panels, ids),))
    tape.replay()
    assert torch.equal(tape.outputs[0], experts.expert_linear(x, panels, ids))
    sizes = tape._keeps[0]
    sizes[0] = 1 << 56  # tokens, more than any memory holds
    with pytest.raises(MemoryError, match="twofold_expert_linear found no memory"):
        tape.replay()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3000)), max_size=60))
def test_the_arena_never_gives_out_a_place_twice(choices: list[tuple[int, int]]) -> None:
    arena, live = Arena(), {}
    for slot, size in choices:
        live.pop(slot, None)
        live[slot] = arena.empty((size,), torch.float32).fill_(slot)[size // 2 :]
        assert all(bool((part == name).all()) for name, part in live.items())
    live.clear()
    before = arena.num_bytes
    whole = arena.empty((1 << 20,), torch.float32)
    assert arena.num_bytes in (before, 4 << 20) and whole.numel() == 1 << 20, "free places were not joined"


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 1), (7, 7), (8, 8), (15, 15), (16, 16), (17, 18), (33, 36), (64, 64), (65, 72)]
)
def test_padding_is_an_eighth_at_most(rows: int, expected: int) -> None:
    assert TapeRecorder().rows_for(rows) == expected

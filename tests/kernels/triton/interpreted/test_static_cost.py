"""The static cost: what a kernel moves is counted, and one that reads something twice is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from twofold.kernels.problems import PlainProblem
from twofold.kernels.registry import Candidate, Quality, Registry
from twofold.kernels.triton import launch_table
from twofold.kernels.triton.candidates import register_triton_ops
from twofold.kernels.triton.counting import Counter
from twofold.kernels.triton.runtime import assume_device, device_arch, num_cores
from twofold.kernels.triton.static_cost import costs, measure_cost
from twofold.kernels.workloads import Inputs, Workload
from twofold.kernels.workloads.linear import linear_workload
from twofold.platforms.arch_spec import spec_of_arch
from twofold.quant.scheme import WeightOnly

INPUTS = Inputs(torch.device("cpu"), torch.float16)
ROWS, COLUMNS = 6, 40


@triton.jit
def scale_kernel(x_ptr: tl.tensor, w_ptr: tl.tensor, out_ptr: tl.tensor, K: tl.tensor, READS: tl.constexpr) -> None:
    columns = tl.arange(0, 64)
    mask = columns < K
    row = tl.program_id(0) * K + columns
    total = tl.zeros([64], dtype=tl.float32)
    for _ in range(READS):
        total += tl.load(x_ptr + row, mask=mask, other=0.0)
    tl.store(out_ptr + row, total * tl.load(w_ptr + columns, mask=mask, other=0.0), mask=mask)


def scale_workload(reads: int) -> tuple[Workload, Candidate]:
    x, weight = torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scale_kernel[(ROWS,)](x, weight, out, COLUMNS, READS=reads)
        return out

    candidate = Candidate(op="scale", name="triton", quality=Quality.NATIVE, can_run=lambda *_: None, run=run)
    workload = Workload(
        op="scale",
        label="",
        problem=PlainProblem(torch.float32),
        bind=lambda candidate: lambda: candidate.run(x, weight),
        num_bytes=2 * x.nbytes + weight.nbytes,
        operations=x.numel(),
        cached=frozenset({"w_ptr"}),
    )
    return workload, candidate


def test_bytes_are_those_of_the_lanes_that_are_not_masked() -> None:
    workload, candidate = scale_workload(1)
    with Counter() as counter:
        workload.bind(candidate)()
    x, weight, out = (counter.arguments[name] for name in ("x_ptr", "w_ptr", "out_ptr"))
    assert (x.loaded, x.touched, x.stored) == (4 * ROWS * COLUMNS, 4 * ROWS * COLUMNS, 0)
    assert (weight.loaded, weight.touched) == (4 * ROWS * COLUMNS, 4 * COLUMNS)
    assert (out.loaded, out.stored) == (0, 4 * ROWS * COLUMNS)


def test_a_kernel_at_its_bound_passes() -> None:
    cost = measure_cost(*scale_workload(1))
    assert cost.ratio == 1.0 and cost.problem == ""
    assert cost.requested == 4 * 3 * ROWS * COLUMNS


def test_a_doubled_read_is_seen() -> None:
    cost = measure_cost(*scale_workload(2))
    assert cost.ratio == pytest.approx((3 * ROWS + 1) / (2 * ROWS + 1))
    assert "reads x_ptr 2.0 times" in cost.problem


def packed_cost(num_rows: int) -> Any:
    registry = Registry()
    register_triton_ops(registry, spec_of_arch("sm_90"))
    candidate = next(row for row in registry.candidates("linear") if row.name == "triton")
    workload = linear_workload(INPUTS, WeightOnly(4, 32), (64, 256), num_rows)
    with assume_device("sm_90", 1):
        return measure_cost(workload, candidate)


def test_a_tile_too_low_for_the_rows_reads_the_weight_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed_cost(32).problem == ""
    low = {launch_table.DEFAULT: launch_table.LinearLaunch(16, 32, 64, 4, 1)}
    monkeypatch.setitem(launch_table.LINEAR, ("some", 2), low)
    assert "stream_ptr 2.0 times" in packed_cost(32).problem


@triton.jit
def product_kernel(a_ptr: tl.tensor, b_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    a = tl.load(a_ptr + rows * 32 + columns)
    b = tl.load(b_ptr + tl.arange(0, 32)[:, None] * 32 + columns)
    tl.store(out_ptr + rows * 32 + columns, tl.dot(a, b))


def test_operations_of_a_matrix_product() -> None:
    out = torch.empty(16, 32)
    with Counter() as counter:
        product_kernel[(1,)](torch.ones(16, 32, dtype=torch.float16), torch.ones(32, 32, dtype=torch.float16), out)
    assert torch.equal(out, torch.full((16, 32), 32.0))
    assert counter.operations == 2 * 16 * 32 * 32


def test_counting_ends_with_the_counter() -> None:
    workload, candidate = scale_workload(1)
    with Counter() as counter:
        pass
    workload.bind(candidate)()
    assert counter.arguments == {}


def test_an_assumed_device_holds_only_inside() -> None:
    cpu = torch.device("cpu")
    with assume_device("gfx942", 304):
        assert (device_arch(cpu), num_cores(cpu)) == ("gfx942", 304)
    assert (device_arch(cpu), num_cores(cpu)) == ("", 4)


@pytest.mark.parametrize("match", ["paged_attention 1 requests", "linear w4g32 asym, 26x256", "add_rms_norm 26"])
def test_the_kernels_keep_to_their_bounds(match: str) -> None:
    found = list(costs("gfx942", match))
    assert found and [cost.problem for cost in found] == [""] * len(found)

"""LoRA's shrinking and expanding products: many adapters in one batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..problems import LoraProblem
from ..registry import Candidate
from .workload import Call, Inputs, ModelShapes, Step, Workload

RANK = 16
NUM_ADAPTERS = 8
# Every tile of ranks or outputs reads its rows of x or y; the order of the rows is small and read by all programs.
_CACHED = frozenset(
    {"x_ptr", "y_ptr", "scales_ptr", "ids_ptr", "order_ptr", "blocks_ptr", "counts_ptr", "totals_ptr", "parts_ptr"}
)


def workloads(inputs: Inputs, model: ModelShapes, step: Step) -> Iterator[Workload]:
    """Adapters of a projection from the hidden size to itself, each request with one of its own."""
    requests = torch.arange(len(step.query_lens)) * 3 % NUM_ADAPTERS
    ids = requests.repeat_interleave(torch.tensor(step.query_lens)).to(device=inputs.device, dtype=torch.int32)
    problem = LoraProblem(rank=RANK, in_features=model.hidden, out_features=model.hidden, dtype=inputs.dtype)
    label = f"{step.num_tokens}x{model.hidden}, {ids.unique().numel()} of {NUM_ADAPTERS} adapters of rank {RANK}"
    yield _shrink(inputs, model, ids, problem, label)
    yield _expand(inputs, model, ids, problem, label)


def _shrink(inputs: Inputs, model: ModelShapes, ids: torch.Tensor, problem: LoraProblem, label: str) -> Workload:
    x, a = inputs.randn(ids.numel(), model.hidden), inputs.randn(NUM_ADAPTERS, RANK, model.hidden)

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(x, a, ids)

    num_bytes = _read_once(ids, a) + x.nbytes + 4 * ids.numel() * RANK + ids.nbytes
    return Workload(
        op="lora_shrink",
        label=label,
        problem=problem,
        bind=bind,
        num_bytes=num_bytes,
        operations=2 * x.numel() * RANK,
        cached=_CACHED,
        allowance=_allowance(ids, a, num_bytes),
    )


def _expand(inputs: Inputs, model: ModelShapes, ids: torch.Tensor, problem: LoraProblem, label: str) -> Workload:
    y, b = torch.randn(ids.numel(), RANK, device=inputs.device), inputs.randn(NUM_ADAPTERS, model.hidden, RANK)
    out = inputs.randn(ids.numel(), model.hidden)
    scales = inputs.uniform(NUM_ADAPTERS)

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(y, b, ids, out, scales)

    num_bytes = _read_once(ids, b) + y.nbytes + 2 * out.nbytes + ids.nbytes
    return Workload(
        op="lora_expand",
        label=label,
        problem=problem,
        bind=bind,
        num_bytes=num_bytes,
        operations=2 * out.numel() * RANK,
        cached=_CACHED,
        allowance=_allowance(ids, b, num_bytes),
    )


def _read_once(ids: torch.Tensor, weight: torch.Tensor) -> int:
    return ids.unique().numel() * weight[0].nbytes


def _allowance(ids: torch.Tensor, weight: torch.Tensor, num_bytes: int) -> float:
    """An adapter is read once per tile of 16 of its rows, so that a row's sums do not depend on its batch."""
    tiles = int((-(-ids.unique(return_counts=True)[1] // 16)).sum())
    again = tiles * weight[0].nbytes - _read_once(ids, weight)
    # The order of the rows, written and read, is 12 bytes a row.
    return 1.05 + (again + 24 * ids.numel()) / num_bytes

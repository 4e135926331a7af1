"""docs/support-matrix.md is what the registry says today."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
import twofold
from twofold.kernels import support_matrix
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import LinearProblem
from twofold.platforms.arch_spec import preferred_dtype_of, spec_of_arch
from twofold.quant.scheme import Scheme, WeightOnly

FILE = Path(twofold.__file__).parent / "docs" / "support-matrix.md"


def test_the_document_is_up_to_date() -> None:
    if unavailable() is not None:
        pytest.skip("there is no C compiler, so the CPU's column would be another one")
    wanted = "it is stale; run: python -m twofold.kernels.support_matrix"
    assert FILE.read_text(encoding="utf-8") == support_matrix.render(), wanted


def test_every_kind_of_scheme_has_a_row() -> None:
    kinds = {type(scheme) for _, scheme in support_matrix.SCHEMES}
    assert kinds == set(get_args(Scheme))


def test_a_cell_is_what_the_engine_chooses() -> None:
    spec = spec_of_arch("gfx942")
    dtype = preferred_dtype_of(spec, torch.bfloat16)
    problem = LinearProblem(scheme=WeightOnly(4, 128), in_features=4096, out_features=4096, dtype=dtype)
    chosen = KernelSet(spec).select_candidate("linear", problem)
    lines = FILE.read_text(encoding="utf-8").splitlines()
    heads = next(line for line in lines if line.startswith("| | cpu")).split("|")
    column = next(index for index, head in enumerate(heads) if "gfx942" in head)
    row = next(line for line in lines if "(w4g128 sym)" in line).split("|")
    assert row[column].strip() == f"{chosen.name}: {chosen.quality.value}"

"""Preflight: whether a checkpoint can be served, decided from headers before any weight is read."""

from __future__ import annotations

import torch

from ...errors import UnsupportedError
from ...kernels.kernel_set import KernelSet
from ...kernels.problems import LinearProblem
from ...quant.formats import Format
from ...quant.formats.names import is_expert
from .checkpoint import Checkpoint


def check_servable(checkpoint: Checkpoint, quant_format: Format, kernels: KernelSet, dtype: torch.dtype) -> None:
    """UnsupportedError or CheckpointError naming the first layer whose scheme or kernel is not served.

    A kernel may still be refused later for the shape of a fused matrix; its scheme is settled here. Experts are judged
    when the model is built of headers, all of a layer together.
    """
    seen = set()
    for module, scheme, (rows, columns) in quant_format.check(checkpoint):
        problem = LinearProblem(scheme=scheme, in_features=columns, out_features=rows, dtype=dtype)
        if problem in seen or is_expert(module):
            continue
        seen.add(problem)
        try:
            kernels.check("linear", problem)
        except UnsupportedError as error:
            raise UnsupportedError(f"{module} is {scheme} ({quant_format.name}): {error}") from None

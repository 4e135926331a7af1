"""Every kernel candidate: asked whether it can run the cases' problems, and checked against its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.kv_cache_type import kv_cache_type
from ..errors import ConfigError
from ..kernels.cases import ACTIVATIONS, TYPICAL, Answer, Case, Sizes, Source, make_cases
from ..kernels.kernel_set import default_registry
from ..kernels.registry import Candidate, Registry
from ..kernels.report import ROUNDING_KERNELS
from ..platforms.interface import Platform

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def check_kernels(platform: Platform, sizes: Sizes = TYPICAL, seed: int = 0) -> list[dict[str, str]]:
    """One row per case and candidate: ``op problem kernel quality status detail``.

    ``status`` is ``selected`` or ``ready`` (it ran and agrees; ``detail`` has the largest error relative to the largest
    value), ``refused`` (``detail`` has the reason) or ``wrong``. Cases of other activations than exact ones have one
    row: the first candidate that rounds inputs so, or why none does.
    """
    dtype = platform.preferred_dtype(torch.bfloat16)
    fp8 = kv_cache_type("fp8", dtype, platform.spec, None).dtype
    registries = {how: _registry(platform, how) for how in ACTIVATIONS}
    rows = []
    for case in make_cases(Source(platform.device, dtype, fp8, sizes, seed)):
        registry = registries[case.activations]
        rows += (
            [_row(case, "", "", "refused", registry)] if isinstance(registry, str) else _rows(platform, case, registry)
        )
    return rows


def _registry(platform: Platform, activations: str) -> Registry | str:
    """The device's candidates, or why it has none for such activations."""
    try:
        return default_registry(platform.spec, activations)
    except ConfigError as error:
        return str(error)


def _rows(platform: Platform, case: Case, registry: Registry) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    selected = False
    tolerance = case.tolerance or TOLERANCE[platform.preferred_dtype(torch.bfloat16)]
    for candidate in _candidates(platform, case, registry):
        reason = candidate.can_run(platform.spec, case.problem)
        status, detail = ("refused", reason) if reason else check(case, candidate, tolerance)
        if status == "ready" and not selected:
            status, selected = "selected", True
        rows.append(_row(case, candidate.name, candidate.quality.value, status, detail))
    return rows


def _candidates(platform: Platform, case: Case, registry: Registry) -> list[Candidate]:
    """Those that a case's answer is of: others than exact activations only some kernels have."""
    found = list(registry.candidates(case.op))
    if case.activations == "exact":
        return found
    rounding = [candidate for candidate in found if candidate.name in ROUNDING_KERNELS[case.activations]]
    return [each for each in rounding if each.can_run(platform.spec, case.problem) is None][:1] or rounding[-1:]


def _row(case: Case, kernel: str, quality: str, status: str, detail: str) -> dict[str, str]:
    about = {"op": case.op, "problem": str(case)}
    return {**about, "kernel": kernel, "quality": quality, "status": status, "detail": detail}


def check(case: Case, candidate: Candidate, tolerance: float) -> tuple[str, str]:
    """Run one candidate and compare it with the definition."""
    try:
        error = relative_error(case.run(candidate), case.expected)
    except Exception as failure:  # whatever a kernel dies of is what the user needs to read
        return "wrong", f"{type(failure).__name__}: {failure}"
    return ("ready" if error <= tolerance else "wrong"), f"error {error:.1e}"


def relative_error(actual: Answer, expected: Answer) -> float:
    """Largest difference over the largest expected value; infinite where something is not finite."""
    pairs = zip(_as_tuple(actual), _as_tuple(expected), strict=True)
    worst = 0.0
    for got, want in pairs:
        difference = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-6)
        worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
    return worst


def _as_tuple(value: Answer) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)

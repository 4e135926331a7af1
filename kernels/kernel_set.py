"""KernelSet: the kernels of one device, chosen once per problem and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..platforms.spec import DeviceSpec
from .cpu.candidates import register_cpu_ops
from .registry import Candidate, Registry, Selection
from .torch_ops import register_torch_ops
from .triton.candidates import register_triton_ops

_HEAVY_OPS = ("linear", "paged_attention")


def default_registry(spec: DeviceSpec) -> Registry:
    """All candidates that this package has for a device, best first."""
    registry = Registry()
    if spec.device_type == "cpu":
        register_cpu_ops(registry)
    else:
        register_triton_ops(registry)
    register_torch_ops(registry, spec)
    return registry


class KernelSet:
    """Chooses a kernel per (operation, problem) on one device and remembers it.

    With ``strict`` a fallback raises UnsupportedError. ``registry`` replaces the package's own candidates.
    """

    def __init__(self, spec: DeviceSpec, *, strict: bool = False, registry: Registry | None = None) -> None:
        self.spec = spec
        self.strict = strict
        self._registry = registry or default_registry(spec)
        self._selections: dict[tuple[str, Any], Selection] = {}

    def select_candidate(self, op: str, problem: Any) -> Candidate:
        """The candidate for a problem; for ``linear``, ``prepare`` its weight before ``run``."""
        key = (op, problem)
        if key not in self._selections:
            self._selections[key] = self._registry.select(op, self.spec, problem, strict=self.strict)
        return self._selections[key].candidate

    def check(self, op: str, problem: Any) -> None:
        """UnsupportedError when nothing can run the problem; nothing is remembered."""
        self._registry.select(op, self.spec, problem, strict=self.strict)

    def select(self, op: str, problem: Any) -> Callable[..., Any]:
        """The chosen candidate's ``run``, with the signature of the operation's definition in ``reference.py``."""
        return self.select_candidate(op, problem).run

    def needs_torch_threads(self) -> bool:
        """Whether a matrix product or attention chosen so far computes on torch's threads; the rest is small."""
        heavy = (selection.candidate for (op, _), selection in self._selections.items() if op in _HEAVY_OPS)
        return any(not candidate.own_threads for candidate in heavy)

    def report(self) -> list[dict[str, str]]:
        """One row per choice made so far: op, problem, kernel, quality, refused (better ones and why not)."""
        return [selection.row() for selection in self._selections.values()]

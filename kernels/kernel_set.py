"""KernelSet: the kernels of one device, chosen once per problem and reported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import ConfigError
from ..platforms.spec import DeviceSpec
from .cpu import linear_bf16, step_memory
from .cpu.candidates import register_cpu_ops
from .cpu.library import unavailable
from .cpu.weight_memory import reserve
from .registry import Candidate, Registry, Selection
from .report import LayerUse, report_rows
from .torch_ops import register_torch_ops
from .triton.candidates import register_triton_ops

_HEAVY_OPS = ("linear", "expert_linear", "paged_attention")


def default_registry(spec: DeviceSpec, cpu_activations: str = "exact") -> Registry:
    """All candidates that this package has for a device, best first.

    ``cpu_activations``, on a CPU (ConfigError for another device): int8: products with weights of integers may round
    their input to 8 bits. bf16: inputs and weights are rounded to bfloat16 (ConfigError without tiles for it).
    """
    registry = Registry()
    if spec.device_type == "cpu":
        if cpu_activations == "bf16" and (reason := linear_bf16.missing()):
            raise ConfigError(f"cpu_activations is 'bf16', but {reason}; choose exact or int8")
        register_cpu_ops(registry, activations=cpu_activations)
    elif cpu_activations != "exact":
        raise ConfigError(f"cpu_activations is {cpu_activations!r}, but the model runs on {spec.arch}; leave it out")
    else:
        register_triton_ops(registry, spec)
    register_torch_ops(registry, spec)
    return registry


class KernelSet:
    """Chooses a kernel per (operation, problem) on one device and remembers it.

    With ``strict`` a fallback raises UnsupportedError. ``registry`` replaces the package's own candidates, among which
    ``cpu_activations`` counts as for ``default_registry``.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        *,
        strict: bool = False,
        registry: Registry | None = None,
        cpu_activations: str = "exact",
    ) -> None:
        self.spec = spec
        self.strict = strict
        self.cpu_activations = cpu_activations
        self._registry = registry or default_registry(spec, cpu_activations)
        self._selections: dict[tuple[str, Any], Selection] = {}
        self._uses: list[LayerUse] = []

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
        """The chosen candidate's ``run``, with the signature of the operation's definition in ``reference/``."""
        return self.select_candidate(op, problem).run

    def select_fused(self, op: str, problem: Any) -> Callable[..., Any] | None:
        """``run`` of an operation that stands for several others; None where this device has no kernel for it.

        Fused operations are a gain, never a need: the caller then selects the parts one by one.
        """
        if all(candidate.can_run(self.spec, problem) for candidate in self._registry.candidates(op)):
            return None
        return self.select(op, problem)

    def needs_torch_threads(self) -> bool:
        """Whether a matrix product or attention chosen so far computes on torch's threads; the rest is small."""
        heavy = (selection.candidate for (op, _), selection in self._selections.items() if op in _HEAVY_OPS)
        return any(not candidate.own_threads for candidate in heavy)

    def weights_coming(self, num_bytes: int) -> AbstractContextManager[None]:
        """While this is open, memory for about so many bytes of prepared weights is got ready where that takes time."""
        if self.spec.device_type != "cpu" or unavailable() is not None:
            return nullcontext()
        return reserve(num_bytes)

    def step_memory(self) -> AbstractContextManager[None]:
        """Open while a step is computed operation by operation: large results lie in memory that steps use in turn."""
        return nullcontext() if self.spec.device_type != "cpu" or unavailable() is not None else step_memory.step()

    def give_back_pages(self) -> None:
        """What steps leave behind in that memory goes back to the system; the next large step clears it anew."""
        if self.spec.device_type == "cpu":
            step_memory.give_back_pages()

    def record(self, layer: str, problem: Any, num_bytes: int) -> None:
        """Note for the report that a layer of a class uses the choice for a problem, and what its weight takes."""
        self._uses.append(LayerUse(layer, problem, num_bytes))

    def report(self) -> list[dict[str, str]]:
        """One row per choice made so far: op, problem, kernel, quality, refused (better ones and why not).

        A choice for weights has a row for each class of layers, with layer, count, scheme and bytes as well.
        """
        return report_rows(self._selections.values(), self._uses)

    def fresh(self) -> KernelSet:
        """The same candidates, device and strictness, with nothing chosen."""
        return KernelSet(self.spec, strict=self.strict, registry=self._registry, cpu_activations=self.cpu_activations)

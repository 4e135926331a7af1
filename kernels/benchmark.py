"""Times of every candidate on workloads, beside what the device reaches in a copy and a matrix product."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..platforms.fp8 import fp8_dtype
from ..platforms.interface import Platform
from ..platforms.spec import Fp8Kind
from .registry import Candidate, Registry
from .timing import Clock
from .workloads import MODELS, SMALL_STEPS, STEPS, Inputs, Step, Workload, workloads

HEADS = ("op", "workload", "kernel", "quality", "us", "GB/s", "TFLOP/s", "of bound", "vs torch", "note")
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
PRODUCT_SIDE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the device reached in this run: bytes per second of a copy (read plus write), operations per second of a
    matrix product in the activations' dtype."""

    copy: float
    product: float

    def __str__(self) -> str:
        return f"copy {self.copy / 1e9:.0f} GB/s, matrix product {self.product / 1e12:.2f} TFLOP/s"

    def seconds(self, workload: Workload) -> float:
        """The least time for a workload. 8-bit products may beat it: the product measured is a 16-bit one."""
        return max(workload.num_bytes / self.copy, workload.operations / self.product)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One candidate on one workload. ``seconds`` None: it was refused, or ``failed``; ``note`` says why. ``bound`` and
    ``peer`` are fractions: of the least time, and how many times as fast as torch's own way."""

    op: str
    label: str
    kernel: str
    quality: str
    seconds: float | None = None
    bytes_per_second: float = 0.0
    operations_per_second: float = 0.0
    bound: float = 0.0
    peer: float | None = None
    note: str = ""
    failed: bool = False

    def cells(self) -> list[str]:
        """The row of a table under ``HEADS``."""
        start = [self.op, self.label, self.kernel, self.quality]
        if self.seconds is None:
            return [*start, "", "", "", "", "", self.note]
        peer = "" if self.peer is None else f"{self.peer:.2f}x"
        rates = [f"{self.bytes_per_second / 1e9:.0f}", f"{self.operations_per_second / 1e12:.2f}"]
        return [*start, f"{self.seconds * 1e6:.1f}", *rates, f"{100 * self.bound:.0f} %", peer, self.note]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure_bounds(platform: Platform, clock: Clock) -> Bounds:
    """Time a copy and a matrix product."""
    kind = platform.spec.device_type
    source = torch.empty(COPY_BYTES[kind], dtype=torch.uint8, device=platform.device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / clock.seconds(lambda: target.copy_(source))
    side, dtype = PRODUCT_SIDE[kind], platform.preferred_dtype(torch.bfloat16)
    a, b = (torch.randn(side, side, device=platform.device, dtype=dtype) for _ in range(2))
    return Bounds(copy, 2 * side**3 / clock.seconds(lambda: a @ b))


def inputs_of(platform: Platform) -> Inputs:
    """Random inputs on a platform in the dtypes that it prefers."""
    fp8 = platform.spec.fp8
    dtype = platform.preferred_dtype(torch.bfloat16)
    return Inputs(platform.device, dtype, None if fp8 is Fp8Kind.NONE else fp8_dtype(fp8))


def all_workloads(inputs: Inputs, models: Iterable[str], steps: Iterable[Step] | None = None) -> Iterator[Workload]:
    """Workloads of models by name and steps; the steps of ``tiny`` models and CPUs are small ones."""
    for name in models:
        small = name == "tiny" or inputs.device.type == "cpu"
        for step in steps or (SMALL_STEPS if small else STEPS):
            yield from workloads(inputs, MODELS[name], step)


def measure(
    platform: Platform,
    registry: Registry,
    chosen: Iterable[Workload],
    clock: Clock,
    bounds: Bounds,
    deadline: float = float("inf"),
    *,
    selected: bool = False,
) -> Iterator[Measurement]:
    """One measurement per workload and candidate, or (``selected``) of the one that an engine would choose.

    Nothing is begun after ``deadline`` (monotonic seconds): the workloads that are left give no measurement.
    """
    for workload in chosen:
        peer = _peer_seconds(workload, clock)
        for candidate in registry.candidates(workload.op):
            if time.monotonic() >= deadline:
                return
            reason = candidate.can_run(platform.spec, workload.problem)
            if reason is None:
                yield _timed(workload, candidate, clock, bounds, peer)
            elif not selected:
                yield _refused(workload, candidate, reason)
            if reason is None and selected:
                break
        if time.monotonic() >= deadline:
            return


def _refused(workload: Workload, candidate: Candidate, reason: str, *, failed: bool = False) -> Measurement:
    return Measurement(
        op=workload.op,
        label=workload.label,
        kernel=candidate.name,
        quality=candidate.quality.value,
        note=reason,
        failed=failed,
    )


def _timed(workload: Workload, candidate: Candidate, clock: Clock, bounds: Bounds, peer: float | None) -> Measurement:
    try:
        seconds = clock.seconds(workload.bind(candidate))
    except Exception as error:  # one broken kernel must not hide the others' times
        return _refused(workload, candidate, f"{type(error).__name__}: {str(error)[:80]}", failed=True)
    return Measurement(
        op=workload.op,
        label=workload.label,
        kernel=candidate.name,
        quality=candidate.quality.value,
        seconds=seconds,
        bytes_per_second=workload.num_bytes / seconds,
        operations_per_second=workload.operations / seconds,
        bound=bounds.seconds(workload) / seconds,
        peer=None if peer is None else peer / seconds,
        note="" if peer is None else f"torch: {workload.peer_name}",
    )


def _peer_seconds(workload: Workload, clock: Clock) -> float | None:
    if workload.peer is None:
        return None
    try:
        return clock.seconds(workload.peer())
    except Exception:  # this torch or this device has no such call: there is nothing to compare with
        return None


def markdown(rows: Iterable[list[str]]) -> str:
    """The measurements' rows as a Markdown table."""
    lines = [HEADS, ["---"] * len(HEADS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

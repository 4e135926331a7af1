"""Tuning: measure candidate settings for every row of the launch tables on the GPU at hand, and keep what is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...platforms.spec import DeviceSpec
from ...quant.scheme import Activation, Dense, Element, Fp8, Int8, WeightOnly
from ..registry import Registry
from ..timing import Clock
from ..workloads import Inputs, ModelShapes, Step, Workload
from ..workloads.attention import attention_workload, random_cache
from ..workloads.experts import expert_workload
from ..workloads.latent_attention import latent_workload
from ..workloads.linear import linear_workload
from .candidates import register_triton_ops
from .launch_attention import LATENT, SCALED_CACHE
from .launch_experts import DENSE_EXPERTS
from .launch_scaled import SCALED, vendor_rows
from .launch_table import ATTENTION, LINEAR, Crossover, Refused, crossover_rows, find_row
from .tune_grids import attention_grid, latent_grid, linear_grid
from .tuned import Key, TunedRow, overriding

# A row is replaced when another is faster by more than clocks differ from run to run.
MARGIN = 0.03
NUM_ROWS = {"few": 8, "some": 48, "many": 256}
CROSSOVER_ROWS = (128, 256, 512, 1024, 2048)
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, slots=True)
class Table:
    """One launch table: its rows, the settings to try, and the workload that a row stands for."""

    name: str
    rows: Mapping[Any, Mapping[str, Any]]
    grid: Callable[[Any, DeviceSpec, Any], Iterator[Any]]
    workload: Callable[[Key, Inputs, ModelShapes], Workload]


@dataclass(frozen=True, slots=True)
class Job:
    """One row to tune: what it is now, and what else to measure."""

    table: Table
    key: Key
    current: Any
    settings: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.table.name} {' '.join(map(str, self.key))}"


def _attention(key: Key, inputs: Inputs, model: ModelShapes) -> Workload:
    assert isinstance(key[1], int)
    shapes, step = replace(model, head_size=key[1]), _attention_step(key[0] == "decode", model)
    return attention_workload(inputs, shapes, step, *random_cache(inputs, shapes, step))


def _scaled_attention(key: Key, inputs: Inputs, model: ModelShapes) -> Workload:
    assert isinstance(key[1], int)
    shapes, step = replace(model, head_size=key[1]), _attention_step(key[0] == "decode", model)
    return attention_workload(inputs, shapes, step, *random_cache(inputs, shapes, step, inputs.fp8 or torch.int8))


def _latent(key: Key, inputs: Inputs, model: ModelShapes) -> Workload:
    kv_dtype = (inputs.fp8 or torch.int8) if key[0] == "scaled" else None
    return latent_workload(inputs, model, _attention_step(True, model), kv_dtype)


def _attention_step(decode: bool, model: ModelShapes) -> Step:
    batch, length = (4, 40) if model.name == "tiny" else (16, 2048)
    return Step("", (1,) * batch, (length,) * batch) if decode else Step("", (length,), (length,))


def _packed(key: Key, inputs: Inputs, model: ModelShapes) -> Workload:
    scheme = WeightOnly(4, model.group_size)
    return linear_workload(inputs, scheme, (2 * model.intermediate, model.hidden), _num_rows(key))


def _num_rows(key: Key) -> int:
    return NUM_ROWS[str(key[0]).split()[0]]


def _scaled(key: Key, inputs: Inputs, model: ModelShapes) -> Workload:
    """8-bit codes times codes, or fp8 weights with activations as they are; without fp8 int8 stands for both."""
    element = Element.INT8 if inputs.fp8 is None else Element.FP8
    grouped = str(key[0]).endswith("grouped")
    activation = Activation(element, 128 if grouped else -1)
    block = (128, 128) if grouped else (1, -1)
    scheme = Int8(block, activation) if inputs.fp8 is None else Fp8(block, activation if key[1] == 1 else None)
    return linear_workload(inputs, scheme, (2 * model.intermediate, model.hidden), _num_rows(key))


def _experts(key: Key, inputs: Inputs, model: ModelShapes) -> Workload:
    """As many tokens as give each expert the rows of the key's class."""
    return expert_workload(inputs, model, Dense(), _num_rows(key) * model.num_experts // model.top_k)


def tables() -> tuple[Table, ...]:
    """Every table that can be tuned."""
    return (
        Table("attention", ATTENTION, attention_grid, _attention),
        Table("scaled cache", SCALED_CACHE, attention_grid, _scaled_attention),
        Table("latent", LATENT, latent_grid, _latent),
        Table("linear", LINEAR, linear_grid, _packed),
        Table("scaled", SCALED, linear_grid, _scaled),
        Table("experts", DENSE_EXPERTS, linear_grid, _experts),
    )


def jobs(spec: DeviceSpec, match: str = "") -> Iterator[Job]:
    """The rows of an architecture whose name contains ``match``; what the table refuses is left out."""
    for table in tables():
        for key, rows in table.rows.items():
            current = find_row(table.name, rows, spec.arch, key)
            if isinstance(current, Refused):
                continue
            settings = tuple(row for row in table.grid(key, spec, current) if row != current)
            job = Job(table, key, current, settings)
            if match in str(job):
                yield job


class Tuner:
    """Measures jobs with a clock. ``inputs`` and ``model`` make the workloads; ``report`` gets a line per row."""

    def __init__(
        self,
        spec: DeviceSpec,
        inputs: Inputs,
        model: ModelShapes,
        clock: Clock,
        report: Callable[[str], None] = print,
    ) -> None:
        self._spec, self._inputs, self._model, self._clock, self._report = spec, inputs, model, clock, report
        self._registry = Registry()
        register_triton_ops(self._registry, spec)

    def tune(self, chosen: Sequence[Job], deadline: float = float("inf")) -> list[TunedRow]:
        """The rows that won, one per job that another setting speeds up; none is begun after ``deadline``."""
        found = []
        for job in chosen:
            if time.monotonic() >= deadline:
                self._report(f"{job}: no time left")
                continue
            row = self._tune_row(job, deadline)
            if row is not None:
                found.append(row)
        return found

    def _tune_row(self, job: Job, deadline: float) -> TunedRow | None:
        call = self._call(job)
        if call is None:
            self._report(f"{job}: no kernel of {self._spec.arch} reads this row")
            return None
        before = self._seconds(job, job.current, call)
        if before is None:
            self._report(f"{job}: its workload does not read this row, or fails with it")
            return None
        best, seconds, num_tried = job.current, before, 0
        for setting in job.settings:
            if time.monotonic() >= deadline:
                break
            num_tried += 1
            measured = self._seconds(job, setting, call)
            if measured is not None and measured < seconds:
                best, seconds = setting, measured
        self._report(f"{job}: {before * 1e6:.1f} -> {seconds * 1e6:.1f} us, {num_tried} of {len(job.settings)} tried")
        if seconds > before * (1 - MARGIN):
            return None
        return TunedRow(job.table.name, job.key, asdict(best), seconds * 1e6, before * 1e6)

    def _call(self, job: Job) -> Callable[[], Any] | None:
        """The job's workload on the best Triton kernel, None where the device has none."""
        workload = job.table.workload(job.key, replace(self._inputs, dtype=_DTYPES[_float_size(job.key)]), self._model)
        for candidate in self._registry.candidates(workload.op):
            if candidate.can_run(self._spec, workload.problem) is None:
                return workload.bind(candidate)
        return None

    def _seconds(self, job: Job, setting: Any, call: Callable[[], Any]) -> float | None:
        """None when a setting does not compile or run, or when the call does not ask for the job's row."""
        with overriding(job.table.name, job.key, setting) as override:
            try:
                seconds = self._clock.seconds(call)
            except Exception:  # too much shared memory, a compiler's failure: this setting is out
                return None
        return seconds if override.uses else None

    def tune_crossovers(self) -> list[TunedRow]:
        """From the packed matmul to dequantizing the weight, from fp8 codes to the vendor's product, if changed."""
        packed = self._crossover("linear", "triton", WeightOnly(4, self._model.group_size), crossover_rows)
        scaled = None
        if self._inputs.fp8 is not None and vendor_rows(self._spec.arch) is not None:
            scheme = Fp8((1, -1), Activation(Element.FP8))
            scaled = self._crossover("scaled", "triton_8bit", scheme, vendor_rows)
        return [row for row in (packed, scaled) if row is not None]

    def _crossover(
        self, name: str, kernel: str, scheme: WeightOnly | Fp8, rows_of: Callable[[str], int | None]
    ) -> TunedRow | None:
        """The fewest of ``CROSSOVER_ROWS`` from which the other way wins at every larger one; None when it stays."""
        shape = (2 * self._model.intermediate, self._model.hidden)
        current, wins = rows_of(self._spec.arch), CROSSOVER_ROWS[-1] * 2
        for num_rows in reversed(CROSSOVER_ROWS):
            workload = linear_workload(self._inputs, scheme, shape, num_rows)
            candidate = next(row for row in self._registry.candidates("linear") if row.name == kernel)
            call = workload.bind(candidate)
            seconds = []
            for limit in (num_rows, num_rows + 1):
                with overriding("crossover", (name,), Crossover(limit)):
                    seconds.append(self._clock.seconds(call))
            if seconds[0] > seconds[1]:
                break
            wins = num_rows
        self._report(f"crossover {name}: {current} -> {wins} rows")
        return None if wins == current else TunedRow("crossover", (name,), {"rows": wins}, 0.0, 0.0)


def _float_size(key: Key) -> int:
    """Bytes of the activations' elements of a row; 8-bit codes come from 16-bit ones."""
    assert isinstance(key[-1], int)
    return max(2, key[-1])

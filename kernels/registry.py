"""The registry: for each operation an ordered list of candidates, each of which says in words why it cannot run.

A choice is never silent: ``Registry.select`` returns the chosen candidate together with the better ones that were
refused and their reasons, and every selection is kept for the kernel report.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..errors import UnsupportedError
from ..platforms.spec import DeviceSpec
from .quantized_input import InputFormat


class Quality(str, enum.Enum):
    """How an operation is carried out on this device."""

    NATIVE = "native"
    DEQUANTIZING = "dequantizing"
    EMULATED = "emulated"
    REFERENCE = "reference"


class Assembly(Protocol):
    """A prepared weight that is filled part by part along N, so that only one part is in memory beside it."""

    def put(self, first_row: int, part: Any) -> None:
        """Rows ``first_row`` and following become those of a canonical weight, which may be a view."""
        ...

    def finish(self) -> Any:
        """What ``prepare`` gives for the whole weight; every row has been put."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One implementation of an operation.

    ``can_run(spec, problem)`` returns None or the reason against it, in words. ``run`` has the signature of the
    operation's definition in ``reference/``. ``prepare`` (linear only) turns a canonical weight into what ``run``
    wants. ``own_threads``: it computes on the platform's own threads instead of torch's.

    ``prepared_bytes(problem, stored)`` (linear only) is the memory of a prepared weight, ``stored`` the canonical one's
    bytes; None: as many. ``shares_dense``: ``prepare`` takes a dense weight of the problem's dtype as it is.
    ``input_format(prepared)`` (linear only): the ``InputFormat`` of quantized inputs that ``run`` takes as well, or the
    dtype of rounded ones.
    ``run_gated`` (linear only): by the name of an activation (Hugging Face's) what gives it of the first half of
    ``run``'s features times the second, as ``input_format`` says or as floats.
    ``assemble(problem)`` (linear only) begins a weight that is prepared part by part; None: it is prepared as a whole.
    ``look_up(problem, stored)`` (linear only): what gives rows (ids int64 [T], prepared) -> [T,K] of a prepared weight,
    bit for bit those of the stored matrix, so that an embedding needs no matrix of its own; ``stored`` is a dense one's
    torch dtype. None: nothing does.
    """

    op: str
    name: str
    quality: Quality
    can_run: Callable[[DeviceSpec, Any], str | None]
    run: Callable[..., Any]
    prepare: Callable[..., Any] | None = None
    own_threads: bool = False
    prepared_bytes: Callable[[Any, int], int] | None = None
    shares_dense: bool = False
    input_format: Callable[[Any], InputFormat | torch.dtype | None] | None = None
    run_gated: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    assemble: Callable[[Any], Assembly] | None = None
    look_up: Callable[[Any, Any], Callable[[Any, Any], Any] | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The outcome of one choice: the candidate, and why better ones were refused (name, reason)."""

    problem: Any
    candidate: Candidate
    refused: tuple[tuple[str, str], ...] = ()

    def row(self) -> dict[str, str]:
        """One line of the kernel report."""
        return {
            "op": self.candidate.op,
            "problem": str(self.problem),
            "kernel": self.candidate.name,
            "quality": self.candidate.quality.value,
            "refused": "; ".join(f"{name}: {reason}" for name, reason in self.refused),
        }


@dataclass(slots=True)
class Registry:
    """Candidates per operation, best first."""

    _candidates: dict[str, list[Candidate]] = field(default_factory=dict)

    def register(self, candidate: Candidate) -> Candidate:
        """Append a candidate behind those already registered for its operation; names are unique per operation."""
        rows = self._candidates.setdefault(candidate.op, [])
        assert all(row.name != candidate.name for row in rows), f"{candidate.op}/{candidate.name} registered twice"
        rows.append(candidate)
        return candidate

    def ops(self) -> tuple[str, ...]:
        """The operations that have a candidate."""
        return tuple(self._candidates)

    def candidates(self, op: str) -> tuple[Candidate, ...]:
        """All candidates of an operation, best first."""
        return tuple(self._candidates.get(op, ()))

    def select(self, op: str, spec: DeviceSpec, problem: Any, *, strict: bool = False) -> Selection:
        """The first candidate that can run. With ``strict``, refuse anything but a native one (UnsupportedError)."""
        refused: list[tuple[str, str]] = []
        for candidate in self.candidates(op):
            reason = candidate.can_run(spec, problem)
            if reason is None:
                if strict and candidate.quality is not Quality.NATIVE:
                    raise UnsupportedError(_strict_message(op, spec, problem, candidate, refused))
                return Selection(problem=problem, candidate=candidate, refused=tuple(refused))
            refused.append((candidate.name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused) or "no candidate is registered"
        raise UnsupportedError(f"no kernel for {op} ({problem}) on {spec.arch}: {reasons}")


def _strict_message(
    op: str, spec: DeviceSpec, problem: Any, candidate: Candidate, refused: list[tuple[str, str]]
) -> str:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused) or "it is the only candidate"
    return (
        f"--strict-kernels: {op} ({problem}) would fall back to {candidate.name} ({candidate.quality.value}) "
        f"on {spec.arch}: {reasons}. Leave the option out to serve it so"
    )

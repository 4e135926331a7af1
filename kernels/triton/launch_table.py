"""Launch settings: one row per (architecture family, operation, shape class), never autotuned at start-up.

A row that ``twofold tune`` measured for the very architecture comes first (``tuned.py``); a family without a row of its
own takes ``DEFAULT``'s. ``check.py`` compiles every row for every architecture it can reach, so a row that spills or
overflows shared memory never ships. The figures below come from those compilations, not from a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .tuned import Key, tuned_row

DEFAULT = "default"

_FAMILIES = {
    "sm_80": "ampere",
    "sm_90": "hopper",
    "sm_100": "blackwell",
    "sm_103": "blackwell",
    "gfx90a": "cdna2",
    "gfx942": "cdna3",
    "gfx950": "cdna4",
}
_PREFIXES = {"gfx9": "cdna2", "gfx12": "rdna4", "gfx1": "rdna3"}


def family(arch: str) -> str:
    """Whose rows an architecture reads; consumer NVIDIA chips, unknown ones and the interpreter: ``default``."""
    if arch in _FAMILIES:
        return _FAMILIES[arch]
    return next((name for prefix, name in _PREFIXES.items() if arch.startswith(prefix)), DEFAULT)


def has_wide_waves(arch: str) -> bool:
    """64 lanes per wave, so that half as many warps cover a tile."""
    return family(arch).startswith("cdna")


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """Element-wise and row kernels: elements per program and warps."""

    elements: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """``block_m`` query rows (tokens times the query heads of one KV head) by ``tile`` cached tokens."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """Tile of the packed matmul; ``block_k`` input features per step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """In place of a row: why this family does not run this shape class."""

    reason: str


@dataclass(frozen=True, slots=True)
class Crossover:
    """Rows of x from which another way to the same product wins."""

    rows: int


Launch = TypeVar("Launch", AttentionLaunch, LinearLaunch)


def find_row(name: str, rows: Mapping[str, Launch | Refused], arch: str, key: Key) -> Launch | Refused:
    """An architecture's row of the table ``name`` under ``key``: the tuned one, else of ``rows`` its family's or the
    default."""
    default = rows[DEFAULT]
    assert not isinstance(default, Refused), f"{name} {key} has no default row"
    row = rows.get(family(arch), default)
    return row if isinstance(row, Refused) else tuned_row(arch, name, key, type(default)) or row


def row_launch(arch: str, columns: int) -> RowLaunch:
    """Settings for rows of ``columns`` elements: about 16 elements per lane, several short rows to a program."""
    wide = has_wide_waves(arch)
    if columns <= 1024:
        return RowLaunch(2048, 2 if wide else 4)
    if columns <= 4096:
        return RowLaunch(4096, 4 if wide else 8)
    return RowLaunch(8192, 8 if wide else 16)


def head_class(head_size: int) -> int:
    """64, 128 or 256, whichever holds a head."""
    return 64 if head_size <= 64 else 128 if head_size <= 128 else 256


_TOO_WIDE = Refused("heads of more than 128 spill: a lane of this architecture has 256 registers")

# (phase, head class, bytes per element of the query) -> family -> row
ATTENTION: dict[tuple[str, int, int], dict[str, AttentionLaunch | Refused]] = {
    ("decode", 64, 2): {
        DEFAULT: AttentionLaunch(16, 32, 4, 3),
        "cdna2": AttentionLaunch(16, 64, 2, 2),
        "cdna3": AttentionLaunch(16, 64, 2, 2),
        "cdna4": AttentionLaunch(16, 64, 2, 2),
        "rdna3": AttentionLaunch(16, 32, 4, 1),
        "rdna4": AttentionLaunch(16, 32, 4, 1),
    },
    ("decode", 128, 2): {
        DEFAULT: AttentionLaunch(16, 32, 4, 3),
        "cdna2": AttentionLaunch(16, 32, 4, 2),
        "cdna3": AttentionLaunch(16, 32, 4, 2),
        "cdna4": AttentionLaunch(16, 32, 4, 2),
        "rdna3": AttentionLaunch(16, 16, 4, 1),
        "rdna4": AttentionLaunch(16, 32, 4, 1),
    },
    ("decode", 256, 2): {
        DEFAULT: AttentionLaunch(16, 32, 4, 2),
        "rdna3": _TOO_WIDE,
        "rdna4": AttentionLaunch(16, 16, 4, 1),
    },
    ("prefill", 64, 2): {
        DEFAULT: AttentionLaunch(64, 64, 4, 2),
        "ampere": AttentionLaunch(128, 64, 8, 3),
        "hopper": AttentionLaunch(128, 64, 8, 3),
        "blackwell": AttentionLaunch(128, 64, 8, 3),
        "cdna2": AttentionLaunch(128, 64, 4, 1),
        "cdna3": AttentionLaunch(128, 64, 4, 1),
        "cdna4": AttentionLaunch(128, 64, 4, 1),
        "rdna3": AttentionLaunch(64, 32, 4, 1),
        "rdna4": AttentionLaunch(64, 32, 4, 1),
    },
    ("prefill", 128, 2): {
        DEFAULT: AttentionLaunch(64, 32, 4, 2),
        "ampere": AttentionLaunch(128, 32, 8, 2),
        "hopper": AttentionLaunch(128, 64, 8, 3),
        "blackwell": AttentionLaunch(128, 64, 8, 3),
        "cdna2": AttentionLaunch(128, 32, 4, 1),
        "cdna3": AttentionLaunch(128, 32, 4, 1),
        "cdna4": AttentionLaunch(128, 64, 4, 1),
        "rdna3": AttentionLaunch(64, 16, 8, 1),
        "rdna4": AttentionLaunch(64, 32, 8, 1),
    },
    ("prefill", 256, 2): {
        DEFAULT: AttentionLaunch(64, 32, 8, 2),
        "cdna2": AttentionLaunch(64, 32, 4, 1),
        "cdna3": AttentionLaunch(64, 32, 4, 1),
        "cdna4": AttentionLaunch(64, 32, 4, 1),
        "rdna3": _TOO_WIDE,
        "rdna4": AttentionLaunch(64, 16, 8, 1),
    },
    ("decode", 64, 4): {DEFAULT: AttentionLaunch(16, 16, 4, 1)},
    ("decode", 128, 4): {
        DEFAULT: AttentionLaunch(16, 16, 4, 1),
        "rdna3": AttentionLaunch(16, 16, 8, 1),
        "rdna4": AttentionLaunch(16, 16, 16, 1),
    },
    ("decode", 256, 4): {
        DEFAULT: AttentionLaunch(16, 16, 4, 1),
        "hopper": AttentionLaunch(16, 16, 8, 1),
        "rdna3": _TOO_WIDE,
        "rdna4": _TOO_WIDE,
    },
    ("prefill", 64, 4): {
        DEFAULT: AttentionLaunch(32, 16, 4, 1),
        "rdna3": AttentionLaunch(16, 16, 4, 1),
        "rdna4": AttentionLaunch(16, 16, 4, 1),
    },
    ("prefill", 128, 4): {
        DEFAULT: AttentionLaunch(16, 16, 4, 1),
        "rdna3": AttentionLaunch(16, 16, 8, 1),
        "rdna4": AttentionLaunch(16, 16, 16, 1),
    },
    ("prefill", 256, 4): {DEFAULT: AttentionLaunch(16, 16, 4, 1), "rdna3": _TOO_WIDE, "rdna4": _TOO_WIDE},
}


def attention_row(arch: str, phase: str, head_size: int, element_size: int) -> AttentionLaunch | Refused:
    """The row for a phase: ``decode`` while the query rows of a request fit one matrix tile, else ``prefill``."""
    key = phase, head_class(head_size), element_size
    return find_row("attention", ATTENTION[key], arch, key)


# (row class, bytes per element of the activations) -> family -> row
LINEAR: dict[tuple[str, int], dict[str, LinearLaunch | Refused]] = {
    ("few", 2): {
        DEFAULT: LinearLaunch(16, 32, 128, 4, 3),
        "cdna2": LinearLaunch(16, 32, 128, 4, 2),
        "cdna3": LinearLaunch(16, 32, 128, 4, 2),
        "cdna4": LinearLaunch(16, 32, 128, 4, 2),
        "rdna3": LinearLaunch(16, 32, 64, 4, 2),
        "rdna4": LinearLaunch(16, 32, 64, 4, 2),
    },
    ("some", 2): {
        DEFAULT: LinearLaunch(64, 64, 64, 8, 3),
        "ampere": LinearLaunch(64, 64, 64, 4, 3),
        "hopper": LinearLaunch(64, 64, 64, 4, 3),
        "blackwell": LinearLaunch(64, 64, 64, 4, 3),
        "cdna2": LinearLaunch(64, 64, 64, 4, 2),
        "cdna3": LinearLaunch(64, 64, 64, 4, 2),
        "cdna4": LinearLaunch(64, 64, 64, 4, 2),
        "rdna3": LinearLaunch(64, 32, 32, 4, 1),
        "rdna4": LinearLaunch(64, 32, 32, 4, 1),
    },
    ("many", 2): {
        DEFAULT: LinearLaunch(128, 64, 64, 8, 3),
        "cdna2": LinearLaunch(128, 64, 64, 8, 2),
        "cdna3": LinearLaunch(128, 64, 64, 8, 2),
        "cdna4": LinearLaunch(128, 64, 64, 8, 2),
        "rdna3": LinearLaunch(64, 64, 32, 8, 1),
        "rdna4": LinearLaunch(64, 64, 32, 8, 1),
    },
    ("few", 4): {DEFAULT: LinearLaunch(16, 32, 64, 4, 1)},
    ("some", 4): {DEFAULT: LinearLaunch(32, 32, 32, 4, 1)},
    ("many", 4): {DEFAULT: LinearLaunch(32, 32, 32, 4, 1)},
}

# Rows of x from which dequantizing the whole weight and a dense product is expected to win.
CROSSOVER_ROWS = {DEFAULT: 512, "hopper": 1024, "blackwell": 1024, "cdna3": 1024, "cdna4": 1024}


def row_class(num_rows: int) -> str:
    """``few``: one matrix-instruction tile; ``some``: still bound by reading the weight; ``many``: by arithmetic."""
    return "few" if num_rows <= 16 else "some" if num_rows <= 64 else "many"


def linear_row(arch: str, num_rows: int, element_size: int) -> LinearLaunch | Refused:
    """The row for ``num_rows`` rows of activations."""
    key = row_class(num_rows), element_size
    return find_row("linear", LINEAR[key], arch, key)


def linear_launch(arch: str, num_rows: int, element_size: int) -> LinearLaunch:
    """``linear_row`` of a problem that the registry did not refuse."""
    row = linear_row(arch, num_rows, element_size)
    assert isinstance(row, LinearLaunch), row.reason
    return row


def crossover_rows(arch: str) -> int:
    """Rows of x from which a packed weight is dequantized as a whole."""
    tuned = tuned_row(arch, "crossover", ("linear",), Crossover)
    return CROSSOVER_ROWS.get(family(arch), CROSSOVER_ROWS[DEFAULT]) if tuned is None else tuned.rows

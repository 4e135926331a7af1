"""Launch rows of the scaled matmul: by row class and bytes of one element of the input (1: codes; 2, 4: floats)."""

from __future__ import annotations

from .launch_table import DEFAULT, Crossover, LinearLaunch, Refused, family, find_row, row_class
from .tuned import tuned_row

SCALED: dict[tuple[str, int], dict[str, LinearLaunch | Refused]] = {
    # Hopper and Blackwell multiply 8-bit floats from 64 rows on; fewer would be widened to 16 bits.
    ("few", 1): {
        DEFAULT: LinearLaunch(16, 64, 128, 4, 3),
        "hopper": LinearLaunch(64, 64, 128, 4, 3),
        "blackwell": LinearLaunch(64, 64, 128, 4, 3),
        "cdna2": LinearLaunch(16, 64, 128, 4, 2),
        "cdna3": LinearLaunch(16, 64, 128, 4, 2),
        "cdna4": LinearLaunch(16, 64, 128, 4, 2),
        "rdna3": LinearLaunch(16, 64, 64, 4, 2),
        "rdna4": LinearLaunch(16, 64, 64, 4, 2),
    },
    ("some", 1): {
        DEFAULT: LinearLaunch(64, 64, 128, 4, 3),
        "cdna2": LinearLaunch(64, 64, 128, 4, 2),
        "cdna3": LinearLaunch(64, 64, 128, 4, 2),
        "cdna4": LinearLaunch(64, 64, 128, 4, 2),
        "rdna3": LinearLaunch(64, 64, 64, 4, 1),
        "rdna4": LinearLaunch(64, 64, 64, 4, 1),
    },
    ("many", 1): {
        DEFAULT: LinearLaunch(128, 128, 64, 8, 3),
        "hopper": LinearLaunch(128, 128, 128, 8, 3),
        "blackwell": LinearLaunch(128, 128, 128, 8, 3),
        "cdna2": LinearLaunch(128, 128, 64, 8, 2),
        "cdna3": LinearLaunch(128, 128, 64, 8, 2),
        "cdna4": LinearLaunch(128, 128, 128, 8, 2),
        "rdna3": LinearLaunch(64, 64, 64, 4, 1),
        "rdna4": LinearLaunch(128, 64, 64, 8, 1),
    },
    ("many grouped", 1): {
        DEFAULT: LinearLaunch(128, 64, 128, 8, 3),
        "cdna2": LinearLaunch(128, 64, 128, 8, 2),
        "cdna3": LinearLaunch(128, 64, 128, 8, 2),
        "cdna4": LinearLaunch(128, 64, 128, 8, 2),
        "rdna3": LinearLaunch(64, 64, 64, 8, 1),
        "rdna4": LinearLaunch(64, 64, 64, 8, 1),
    },
    ("few", 2): {
        DEFAULT: LinearLaunch(16, 32, 128, 4, 3),
        "cdna2": LinearLaunch(16, 32, 128, 4, 2),
        "cdna3": LinearLaunch(16, 32, 128, 4, 2),
        "cdna4": LinearLaunch(16, 32, 128, 4, 2),
        "rdna3": LinearLaunch(16, 32, 64, 4, 2),
        "rdna4": LinearLaunch(16, 32, 64, 4, 2),
    },
    ("some", 2): {
        DEFAULT: LinearLaunch(64, 64, 64, 4, 3),
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
    ("few", 4): {
        DEFAULT: LinearLaunch(16, 32, 64, 4, 1),
        "rdna3": LinearLaunch(16, 32, 32, 4, 1),
        "rdna4": LinearLaunch(16, 32, 32, 4, 1),
    },
    ("some", 4): {DEFAULT: LinearLaunch(32, 32, 32, 4, 1)},
    ("many", 4): {DEFAULT: LinearLaunch(32, 32, 32, 4, 1)},
}

MAX_CORRECTED_ROWS = 64

# Rows of x from which the vendor's product of fp8 codes is expected to win: chips where torch has it for a scale per
# token and output feature.
VENDOR_ROWS = {"hopper": 256, "blackwell": 256, "cdna3": 256, "cdna4": 256}


def scaled_row(
    arch: str, num_rows: int, element_size: int, *, grouped: bool = False, corrected: bool = False
) -> LinearLaunch | Refused:
    """The row for ``num_rows`` rows of inputs.

    ``grouped``: each step has scales of its own, which take registers; ``corrected``: zero points, too.
    """
    kind = row_class(min(num_rows, MAX_CORRECTED_ROWS) if corrected else num_rows)
    separate = grouped and (f"{kind} grouped", element_size) in SCALED
    key = (f"{kind} grouped" if separate else kind), element_size
    return find_row("scaled", SCALED[key], arch, key)


def scaled_launch(
    arch: str, num_rows: int, element_size: int, *, grouped: bool = False, corrected: bool = False
) -> LinearLaunch:
    """``scaled_row`` of a problem that the registry did not refuse."""
    row = scaled_row(arch, num_rows, element_size, grouped=grouped, corrected=corrected)
    assert isinstance(row, LinearLaunch), row.reason
    return row


def vendor_rows(arch: str) -> int | None:
    """Rows of x from which the vendor's product is taken, where its scales allow it; None: never."""
    rows = VENDOR_ROWS.get(family(arch))
    tuned = None if rows is None else tuned_row(arch, "crossover", ("scaled",), Crossover)
    return rows if tuned is None else tuned.rows

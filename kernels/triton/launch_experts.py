"""Launch rows of the products with experts; the shape class is the rows that an expert gets on average."""

from __future__ import annotations

from .launch_table import DEFAULT, LinearLaunch, Refused, find_row, row_class

# (row class, bytes per element of the activations) -> family -> row
DENSE_EXPERTS: dict[tuple[str, int], dict[str, LinearLaunch | Refused]] = {
    ("few", 2): {
        DEFAULT: LinearLaunch(16, 64, 128, 4, 3),
        "cdna2": LinearLaunch(16, 64, 128, 4, 2),
        "cdna3": LinearLaunch(16, 64, 128, 4, 2),
        "cdna4": LinearLaunch(16, 64, 128, 4, 2),
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
        DEFAULT: LinearLaunch(128, 128, 64, 8, 3),
        "cdna2": LinearLaunch(128, 128, 64, 8, 1),
        "cdna3": LinearLaunch(128, 128, 64, 8, 1),
        "cdna4": LinearLaunch(128, 128, 64, 8, 2),
        "rdna3": LinearLaunch(64, 64, 32, 8, 1),
        "rdna4": LinearLaunch(64, 64, 32, 8, 1),
    },
    ("few", 4): {DEFAULT: LinearLaunch(16, 32, 64, 4, 1)},
    ("some", 4): {DEFAULT: LinearLaunch(32, 32, 32, 4, 1)},
    ("many", 4): {DEFAULT: LinearLaunch(32, 32, 32, 4, 1)},
}


def dense_row(arch: str, rows_per_expert: int, element_size: int) -> LinearLaunch | Refused:
    """The row for experts that get about ``rows_per_expert`` rows each."""
    key = row_class(rows_per_expert), element_size
    return find_row("experts", DENSE_EXPERTS[key], arch, key)


def dense_launch(arch: str, rows_per_expert: int, element_size: int) -> LinearLaunch:
    """``dense_row`` of a problem that the registry did not refuse."""
    row = dense_row(arch, rows_per_expert, element_size)
    assert isinstance(row, LinearLaunch), row.reason
    return row
